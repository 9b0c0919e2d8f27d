"""What an adapter trains in full is not quantised with the rest of the base, whatever kind of module it is."""

import pytest
import torch

from isotype.config.schema import RunConfig
from isotype.model.adapter import save_adapter
from isotype.model.build import build_model
from isotype.model.load import Source, load_tokenizer
from isotype.precision import PRESETS
from isotype.precision.apply import is_quantised
from isotype.tasks.language.outline import outline
from isotype.tasks.language.result import load_result
from tests.models import tiny

pytest.importorskip("bitsandbytes")

NF4, CPU = PRESETS["nf4-lora"], torch.device("cpu")
# family -> what is trained in full, and the layers of the base that stay quantised
CASES = {
    "head of several layers": ("roberta-prelayernorm", {"is_decoder": True}, ["lm_head"], 12),
    "layers of the body": ("llama", {}, ["down_proj", "1.mlp.up_proj"], 11),
    "head alone": ("llama", {}, ["lm_head"], 14),
}  # fmt: skip


@pytest.mark.parametrize("case", [case if case == "layers of the body" else pytest.param(case, marks=pytest.mark.full) for case in CASES])
def test_what_is_trained_in_full_is_not_quantised(case, workshop, tmp_path):
    family, more, names, packed = CASES[case]
    tokenizer = load_tokenizer(RunConfig.model_validate({"model": {"name": str(workshop.base)}}).model)
    base = tiny(family, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, **more)
    base.save_pretrained(tmp_path / "base")
    source = Source(str(tmp_path / "base"))
    config = RunConfig.model_validate({
        "model": {"name": source.name}, "adapter": {"r": 2, "targets": ["q_proj", "query"], "modules_to_save": names},
    })  # fmt: skip
    planned = outline(base.config, config, NF4, device_type="cpu")
    model, _ = build_model(config, NF4, source, tokenizer, CPU)
    for made in (planned.model, model):
        assert sum(is_quantised(p) for p in made.parameters()) == packed
    assert planned.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)

    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    in_full = {name: p for name, p in model.named_parameters() if ".modules_to_save." in name}
    assert in_full
    assert all(p.dtype == torch.float32 and p.grad is not None for p in in_full.values())
    with torch.no_grad():
        for parameter in in_full.values():
            parameter.add_(0.01)
        said = model.eval()(input_ids=ids).logits + 0
    save_adapter(model, tmp_path / "adapter", NF4)
    again = load_result(tmp_path / "adapter", source, NF4, config=config.model, device=CPU).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits + 0, said)
