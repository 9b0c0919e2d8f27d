"""`isotype quickstart --diffusion`: pictures of shapes, and a small model that learns to draw them.

shapes      the pictures, drawn
judge       says what a picture shows, from its pixels
parts       the pipeline: a VAE trained on shapes, encoders and a transformer with random weights
quickstart  both stages, and what they drew
"""

from .quickstart import Size, judge_runs, quickstart_pictures

__all__ = ["Size", "judge_runs", "quickstart_pictures"]
