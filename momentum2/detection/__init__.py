"""Detectors on a pretrained encoder: fine-tuning, COCO and LVIS metrics, use on images."""
