"""The scores of a detector on a test set: numbers, files and a picture."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from momentum2 import distributed
from momentum2.data.contact_sheet import write_picture
from momentum2.detection.coco_eval import Detection, Kind, Style, evaluate
from momentum2.detection.data import DetectionData
from momentum2.detection.detector import Detector
from momentum2.detection.pictures import draw, grid
from momentum2.detection.predict import predict
from momentum2.evaluate.features import evaluating
from momentum2.files import write_whole
from momentum2.runs.names import DETECTIONS, PREDICTIONS, RESULTS

_SHOWN = 8  # images of predictions.png
_NAMES = {"bbox": "boxes", "segm": "masks"}


class DetectionScores:
    """Evaluates one detector on one test set."""

    def __init__(self, detector: Detector, data: DetectionData, device: torch.device, style: Style) -> None:
        self.detector, self.data, self.device, self.style = detector, data, device, style
        self.kinds: tuple[Kind, ...] = ("bbox", "segm") if detector.masks else ("bbox",)
        self.scores: dict[str, dict[str, Any]] = {}
        self.detections: list[Detection] = []

    def run(self) -> dict[str, dict[str, Any]]:
        """Scores of boxes (`bbox`) and masks (`segm`), equal on all processes."""
        self.detections = predict(self.detector, self.data, self.device)
        truth = self.data.ground_truth()
        self.scores = {kind: evaluate(truth, self.detections, kind, self.style) for kind in self.kinds}
        return self.scores

    def headline(self) -> dict[str, float]:
        """AP and AP50 for the log."""
        scores = self.run()
        return {f"{kind}_{name}": scores[kind][name] or 0.0 for kind in self.kinds for name in ("AP", "AP50")}

    def write(self, out: Path) -> None:
        """`results.json`, `detections.json` (COCO's format), `predictions.png` and a table on the terminal."""
        if not self.scores:  # the loop has evaluated the last step already, if it evaluates at all
            self.run()
        if not distributed.is_main():
            return
        out.mkdir(parents=True, exist_ok=True)
        results = {"images": len(self.data.image_ids), "style": self.style, **self.scores}
        # Who finds results.json may take the evaluation for finished.
        write_whole(out / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
        write_whole(out / DETECTIONS, json.dumps(self.detections).encode())
        with evaluating(self.detector):
            shown = grid([self._picture(i) for i in range(len(self.data.image_ids[:_SHOWN]))])
        write_picture(shown, out / PREDICTIONS)
        self._print(out)

    def _picture(self, i: int) -> Image.Image:
        image = self.data.image(i)
        return draw(image, self.detector.detect(image.to(self.device).float() / 255), self.data.class_names)

    def _print(self, out: Path) -> None:
        say = logging.getLogger("momentum2").info
        say(f"detection on {self.data.name}, {len(self.data.image_ids):,} images")
        for kind, scores in self.scores.items():
            numbers = ((n, v) for n, v in scores.items() if n != "per_class" and v is not None)
            say(f"{_NAMES[kind]}  " + "  ".join(f"{name} {100 * value:.2f}" for name, value in numbers))
        say(f"written to {out / RESULTS} and {out / PREDICTIONS}")
