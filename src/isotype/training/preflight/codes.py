"""Lists the codes of the preflight's checks, and parses the option `--skip CODE=REASON`. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from ...errors import UsageError

# code -> what must hold, as the preflight's report says it
CODES: Mapping[str, str] = {
    "PF001": "the device is the one expected",
    "PF003": "updates survive rounding into the trained dtype",
    "PF004": "the disk holds the checkpoints",
    "PF005": "rows have tokens to learn",
    "PF006": "prompts are not learnt where answers are meant",
    "PF007": "answers teach where to stop",
    "PF008": "every token has an embedding",
    "PF009": "new tokens are trained",
    "PF010": "chats have a template",
    "PF011": "the run fits into memory",
    "PF012": "a training step runs",
    "PF013": "loss and gradients are finite",
    "PF014": "every trained tensor gets a gradient",
    "PF015": "no other tensor gets one",
    "PF016": "an evaluation runs",
    "PF017": "a generation runs",
    "PF018": "packed documents do not see each other",
    "PF020": "rows fit into the model's positions",
    "PF023": "places of pictures are not learnt",
    "PF024": "the adapter loads onto the released model",
}
# the checks that cannot be skipped, each with the reason
UNSKIPPABLE_REASONS = {"PF008": "the run would read outside its embeddings"}


def check_skips(skips: Mapping[str, str], template: str = "skip={{'{}': '...'}}") -> dict[str, str]:
    """Checks whether the user may skip these checks, and returns them as a mapping from code to
    reason.

    template  the form in which the user writes a code, for the error message
    Raises    UsageError if no check has this code, if the check must not be left out, or if the
              reason is missing
    """
    for code, reason in skips.items():
        option = template.format(code)
        if code not in CODES:
            close_codes = get_close_matches(code.upper(), CODES, n=1)
            raise UsageError(
                f"{option}: no such check",
                fix=f"did you mean {close_codes[0]}?"
                if close_codes
                else f"one of: {' '.join(CODES)}",
            )
        if code in UNSKIPPABLE_REASONS:
            raise UsageError(
                f"{option}: cannot be skipped: {UNSKIPPABLE_REASONS[code]}",
                fix=f"isotype doctor explain {code}",
            )
        if not str(reason).strip():
            raise UsageError(f"{option}: a reason is needed", fix="say why it does not matter here")
    return dict(skips)


def parse_skips(options: Sequence[str]) -> dict[str, str]:
    """Parses options such as `["PF004=shared disk"]`. Returns a mapping from code to reason. Raises
    UsageError.
    """
    skips: dict[str, str] = {}
    for option in options:
        code, _, reason = option.partition("=")
        code = code.strip().upper()
        if code in skips:
            raise UsageError(f"--skip {code}: given twice")
        skips[code] = reason.strip()
    return check_skips(skips, '--skip {}="..."')
