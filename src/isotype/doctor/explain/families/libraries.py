"""Errors of libraries outside torch that a dtype was handed to."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family


@family("EX035", "dtype as data", "outside torch")
def outside_torch(s: Seen) -> Explained:
    """A library outside torch does not take this dtype

    **Why it matters.** bf16 ends at torch's border and fp16 soon after it: images are uint8, numpy's linear algebra and Arrow's arithmetic
    have no fp16, and a `torch.dtype` is an object that no JSON or YAML file holds.

    **Example.** `json.dump({"dtype": torch.bfloat16}, f)` when a configuration is saved; `Image.fromarray` of fp16 pixels.

    **What to do.** Convert at the border: `str(dtype).removeprefix("torch.")`, `x.float().numpy()`, `(x * 255).round().astype("uint8")`.
    """
    if s.operator == "dtype as data":
        return Explained(
            message="a torch.dtype cannot be written as JSON or YAML",
            causes=[
                Cause(
                    name="a torch.dtype among a configuration's values",
                    score=3,
                    why="a setting holds the object torch.bfloat16 (or another), and the file format knows words and numbers only",
                    fix='keep the word, "bfloat16", and look it up where it is needed; or write str(dtype).removeprefix("torch.")',
                    because="the text names the type dtype",
                )
            ],
        )
    dtype, library = s.dtype("missing", "this dtype"), s.words.get("library", "")
    if "data type: (" in s.text:
        fix = "8-bit pixels: Image.fromarray((x.clip(0, 1) * 255).round().astype('uint8')), x of shape [height, width, 3]"
        library, dtype = "PIL", {"2": "fp16", "4": "fp32", "8": "fp64"}.get(s.words.get("bytes", ""), dtype)
    else:
        fix = "give it fp32: x.float().cpu().numpy(), or array.astype('float32')"
    library = {"linalg": "numpy.linalg", "no kernel matching": "Arrow", "convert np.ndarray": "torch.from_numpy"}.get(
        library, library
    ) or "this library"
    return Explained(
        message=f"{library} does not take {dtype}",
        causes=[
            Cause(
                name=f"{library} has no {dtype} here",
                score=3,
                why=f"an array of {dtype} was handed to {library}, which has no code for it",
                fix=fix,
                because="the text names the dtype",
            )
        ],
    )
