"""torchvision 0.29.2, LT007: `perspective_keypoints` on bf16 (or fp16) keypoints: the homogeneous ones are fp32.

The function's own lines, from _geometry.py:2080, on the tensors that it makes.
"""

import torch

keypoints = torch.rand(3, 2).bfloat16()
theta = torch.rand(2, 3, dtype=keypoints.dtype)
points = torch.cat([keypoints, torch.ones(keypoints.shape[0], 1)], dim=-1)
print("points:", points.dtype)
torch.matmul(points, theta.T)
