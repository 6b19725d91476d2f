"""What the files of a run directory are called. No other place says it."""

CONFIG = "config.yaml"
PLAN = "plan.txt"
PLAN_DATA = "plan.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
STEP = "step-"  # begins the name of a checkpoint
ENCODER = "encoder.safetensors"
START = "start.safetensors"  # the encoder before the first step, if it was not random
RESULTS = "results.json"
REPORT = "report.html"
BAD_IMAGES = "bad_images.txt"
LOCK = ".lock"
RESULTS_LOCK = ".results.lock"
TENSORBOARD = "tensorboard"
MLRUNS = "mlruns"
TRACKER = "tracker-"  # begins the name of what was sent to a tracker
# Of a detector:
DETECTOR = "detector.safetensors"
DETECTIONS = "detections.json"
PREDICTIONS = "predictions.png"
