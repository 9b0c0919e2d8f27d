"""`distil`: the model learns the next-token distributions of a teacher with the same vocabulary, at every learnt token.

loss of a token  (1 - cross_entropy) D + cross_entropy (-ln p(token)), D as `ops.linear_divergence` defines it by `beta` and `temperature`
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from ...config.schema import RunConfig
from ...data.rows import IGNORED
from ...dtypes import to_torch
from ...errors import UsageError
from ...model.architecture import auto_class
from ...model.load import Source, explained, load_base
from ...ops.linear_divergence.op import divergence
from ...optimize import deferring, optimize
from ...optimize.deferred import DeferredLogits
from ...precision.apply import apply_precision
from ...precision.precision import Precision
from ...precision.quantised_base import of_config
from ...training.memory.device import shown
from ...training.task import Words
from .batches import Batch
from .loss import model_inputs, takes_one_row
from .objective import Beside, NextToken


class Distil(NextToken):
    """A step's loss is the mean over its learnt tokens."""

    teacher: nn.Module | None = None

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.settings = config.distil
        measures = ("divergence", "cross_entropy") if self.settings.cross_entropy else ()
        self.words = Words(units="tokens", unit="tok", weight="supervised", measures=measures)

    def check(self) -> None:
        if self.settings.teacher is None:
            raise UsageError("train.objective: distil needs a teacher", fix="distil.teacher: a folder or a hub id")

    def beside(self, tokenizer: Any, precision: Precision, device: torch.device | None) -> Beside:
        """The teacher, frozen, in the dtype of products. Raises UsageError for one with another vocabulary."""
        assert self.settings.teacher is not None, "checked before anything is loaded"
        name, revision = self.settings.teacher, self.settings.revision
        with explained(name, "tokenizer", revision):
            mine, theirs = tokenizer.get_vocab(), AutoTokenizer.from_pretrained(name, revision=revision).get_vocab()
        if differ := len(mine.items() ^ theirs.items()):
            raise UsageError(
                f"distil.teacher: {name} has another vocabulary than the model: {differ:,} entries differ "
                f"({len(theirs):,} tokens there, {len(mine):,} here)",
                fix="a teacher of the same family",
            )
        with explained(name, "model", revision), torch.device("meta"):
            architecture = AutoConfig.from_pretrained(name, revision=revision)
            if of_config(architecture) is not None:
                raise UsageError(f"distil.teacher: {name} is quantised before it is saved: not offered", fix="the model that is not")
            elements = sum(p.numel() for p in auto_class(architecture).from_config(architecture).parameters())
        dtype, notes = precision.compute, list[str]()
        if device is not None:
            own = Precision(base=dtype, compute=dtype, generate=dtype, save=dtype)
            source = Source(name, revision)
            base = load_base(source, own, attention=self.config.model.attention, device=device, trainable=False, notes=notes)
            base.config.use_cache = False
            if self.config.model.optimize:
                optimize(base, own, device_type=device.type)
            apply_precision(base, own, device_type=device.type)
            self.teacher = base.requires_grad_(False).eval()
        size = elements * to_torch(dtype).itemsize
        return Beside(size, [f"distil.teacher: {name}, {elements:,} parameters, frozen in {dtype}, {shown(size)}", *notes])

    def loss_sum(self, model: nn.Module, batch: Batch, *, dtype: str) -> Tensor:
        """float[], or float[3] with a share of cross-entropy. Where there is no teacher yet, in a plan, the student is its own."""
        share, beta, temperature = self.settings.cross_entropy, self.settings.beta, self.settings.temperature
        if batch.position_ids is not None and any(takes_one_row(one) for one in (model, self.teacher) if one is not None):
            batch = batch.as_one_row()
        student = _learnt_logits(model, batch, dtype)
        with torch.no_grad():
            taught = student.detach() if self.teacher is None else _learnt_logits(self.teacher, batch, dtype)
        if isinstance(student, DeferredLogits) and isinstance(taught, DeferredLogits):
            found = student.recipe.divergence(taught.recipe, beta=beta, temperature=temperature).sum()
        else:
            classes = min(student.shape[-1], taught.shape[-1])
            s, t = ((z[..., :classes].to(to_torch(dtype)) / temperature).log_softmax(-1) for z in (student, taught))
            found = divergence(s, t, beta).sum()
        if not share:
            return found
        assert batch.counted is not None
        targets_N = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten().index_select(0, batch.counted)
        nll = F.cross_entropy(student.to(to_torch(dtype)), targets_N, reduction="none").sum()
        return torch.stack([(1 - share) * found + share * nll, found.detach(), nll.detach()])


def _learnt_logits(model: nn.Module, batch: Batch, dtype: str) -> Tensor:
    """[N V] at the positions whose next token is learnt; deferred where an op has the head and the loss is fp32."""
    assert batch.counted is not None
    with deferring() if dtype == "fp32" else nullcontext():
        logits_BTV = model(**model_inputs(model, batch)).logits
        learnt_NV: Tensor = logits_BTV.reshape(-1, logits_BTV.shape[-1]).index_select(0, batch.counted)
        return learnt_NV
