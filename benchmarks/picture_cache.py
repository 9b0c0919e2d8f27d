"""The time and memory of encoding many pictures once, with a tiny random Stable Diffusion, so that reading, scaling and storing dominate.

python benchmarks/picture_cache.py FOLDER 2000     # draws JPEGs of 1600 x 1200 pixels into FOLDER first; 80 MiB for 2,000
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from shutil import rmtree

import numpy as np
from PIL import Image

from isotype.config.load import load
from isotype.tasks.choose import choose_task
from isotype.training.device_setup import prepare_data

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tasks.diffusion.conftest import Studio


def draw_pictures(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(len(list(folder.glob("*.jpg"))), count):
        coarse = generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC)
        picture.save(folder / f"{i}.jpg", quality=88)
        (folder / f"{i}.txt").write_text(f"a red circle {i}\n")
    return folder


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int, help="number of pictures")
    arguments = parser.parse_args()
    place, count = arguments.folder, arguments.count
    place.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(place / f"pictures_{count}", count)
    rmtree(place / "cache", ignore_errors=True)
    settings = [
        f"model.name={Studio(place).sd1}",
        f"images.train={pictures}",
        "images.resolution=256",
        "images.eval_split=0",
        f"images.cache={place / 'cache'}",
        f"run.folder={place / 'run'}",
    ]
    loaded = load(None, settings, {})
    task = choose_task(loaded.config)
    setup = prepare_data(task, loaded.sources)
    before, began = peak_mib(), time.process_time()
    task.encode(setup.device)
    seconds = time.process_time() - began
    print(
        f"{count} pictures: {1000 * seconds / count:.0f} ms of CPU time each; the peak memory of the"
        f" process rose from {before} to {peak_mib()} MiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
