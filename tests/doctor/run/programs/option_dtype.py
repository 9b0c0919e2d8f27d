"""An option of the command line gives the dtype of the pixels; the weights have another."""

import argparse
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
args = parser.parse_args(["--dtype", "bfloat16"] if "repaired" in sys.argv else [])
weight_dtype = getattr(torch, args.dtype)


def encode(model, pixels):
    pixels = pixels.to(dtype=weight_dtype)
    return model(pixels)


encode(nn.Conv2d(3, 4, 3).to(torch.bfloat16), torch.rand(1, 3, 8, 8))
