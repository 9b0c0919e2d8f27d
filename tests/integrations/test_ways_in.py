"""The thin ways in: a callback, axolotl's plugin, ms-swift's external plugin. The tools themselves are stood in for by their interface."""

import importlib
import runpy
import sys
import types

import pytest
from transformers import TrainerCallback

from isotype.errors import UsageError
from isotype.integrations import IsotypeCallback
from isotype.integrations.claims import ATTACHED
from tests.integrations.trainers import TRAINERS, Setting, curve, plain, sft

pytest.importorskip("trl")


def with_callbacks(setting, *callbacks):
    """As LLaMA-Factory hands its callbacks to a trainer's constructor."""
    from transformers import Trainer

    class Given(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=list(callbacks), **kwargs)

    return plain(setting, Given)


def test_a_callback_attaches_when_the_trainer_is_first_used(models):
    want = curve(plain(Setting(models)))
    callback = IsotypeCallback("fp32", quiet=True)
    trainer = with_callbacks(Setting(models), callback)
    assert callback.trainer is trainer
    assert ATTACHED not in trainer.__dict__
    assert curve(trainer) == pytest.approx(want, rel=1e-5)
    assert ATTACHED in trainer.__dict__


def test_a_callback_sees_the_head_that_trl_puts_on_after_transformers_constructor(models, monkeypatch):
    import trl

    own = trl.SFTTrainer.__init__
    monkeypatch.setattr(
        trl.SFTTrainer, "__init__", lambda self, *a, **k: own(self, *a, callbacks=[IsotypeCallback("fp32", quiet=True)], **k)
    )
    trainer = sft(Setting(models))
    trainer.evaluate()
    assert {e.op for e in trainer.__dict__[ATTACHED].manifest.entries if e.part == "head"} == {"linear_log_probs"}
    trainer.train()


def test_a_callback_added_to_a_complete_trainer_is_refused(models):
    trainer = plain(Setting(models))
    trainer.add_callback(IsotypeCallback("fp32"))
    with pytest.raises(UsageError, match="complete already"):
        trainer.train()


def test_axolotls_plugin_attaches_with_the_precision_of_the_configuration(models, capsys, monkeypatch):
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "isotype.integrations.axolotl", raising=False)
    module = importlib.import_module("isotype.integrations.axolotl")
    plugin = module.IsotypePlugin()
    assert isinstance(plugin, base.BasePlugin)
    path, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(importlib.import_module(path), name)(isotype_precision="fp32").isotype_precision == "fp32"
    trainer = TRAINERS["SFT"](Setting(models, bf16=True))
    plugin.post_trainer_create({"isotype_precision": "bf16-lora", "isotype_skip": {"PF017": "no samples here"}, "bf16": True}, trainer)
    assert trainer.__dict__[ATTACHED].resolved.preset == "bf16-lora"
    assert "isotype attached to SFTTrainer" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "isotype.integrations.axolotl")


def test_ms_swifts_external_plugin(models, monkeypatch):
    import isotype.integrations.swift as ours

    callbacks = types.ModuleType("swift.callbacks")
    callbacks.callbacks_map = {}
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)
    runpy.run_path(ours.__file__)
    monkeypatch.setenv("ISOTYPE_PRECISION", "fp32")
    trainer = plain(Setting(models))
    made = callbacks.callbacks_map["isotype"](trainer.args, trainer)
    assert isinstance(made, TrainerCallback)
    trainer.add_callback(made)
    trainer.train()
    assert trainer.__dict__[ATTACHED].resolved.preset == "fp32"
