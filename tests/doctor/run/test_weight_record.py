"""The record of the calls that give weights their dtypes."""

import gc
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.api import (
    RECORD,
    find_recorded_default_dtype_setter,
    find_recorded_origin,
    remove_record_frames,
)


@pytest.fixture(autouse=True)
def record():
    RECORD.install()
    yield
    RECORD.remove()


def cast_layers(model):
    for layer in model:
        layer.to(torch.bfloat16)


def origin_of(module, dtype=torch.bfloat16):
    return find_recorded_origin(module.modules(), dtype)


def test_last_cast_of_a_helper_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    cast_layers(model)
    origin = origin_of(model)
    assert (origin.kind, origin.text) == ("cast", "layer.to(torch.bfloat16)")
    assert origin.location.endswith(f":{cast_layers.__code__.co_firstlineno + 2}")
    assert origin_of(model, torch.float16) is None


def test_move_without_a_new_dtype_is_no_cast():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    model.to("cpu")
    assert origin_of(model).text == "nn.Linear(2, 2, dtype=torch.bfloat16)"


def test_dtype_that_was_set_in_place_has_no_recorded_line():
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert origin_of(model) is None


def test_cast_by_a_library_names_its_function():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    adapter = origin_of(adapted.base_model.model[0].lora_A)
    assert adapter.kind == "adapters"
    assert adapter.text == "peft.get_peft_model(model, config, autocast_adapter_dtype=False)"
    adapted = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)).half(), config)
    assert origin_of(adapted.base_model.model[0].lora_A, torch.float32).kind == "default"


def test_cast_in_a_trainer_names_the_call_and_the_method_that_casts(tmp_path):
    transformers = pytest.importorskip("transformers")
    module = nn.Module()
    module.layer = nn.Linear(2, 2)
    config = transformers.TrainingArguments(str(tmp_path), bf16_full_eval=True, use_cpu=True)
    trainer = transformers.Trainer(module, config, eval_dataset=[])
    trainer.evaluate()
    origin = origin_of(module)
    assert (origin.kind, origin.text) == ("library", "trainer.evaluate()")
    assert origin.function.startswith("Trainer.evaluation_loop (transformers/trainer.py:")


def test_traceback_does_not_contain_the_record():
    try:
        nn.Module().register_buffer("a.b", torch.ones(1))
    except KeyError:
        error = sys.exc_info()[1]
    assert len(traceback.extract_tb(error.__traceback__)) == 3
    remove_record_frames(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names == ["test_traceback_does_not_contain_the_record", "register_buffer"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_with_other_tables_are_recorded():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model.half()
    assert origin_of(model, torch.float16).text == "model.half()"


def restore_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    torch.set_default_dtype(torch.float32)


def test_default_dtype_that_was_restored_has_no_setter():
    original = torch.set_default_dtype
    restore_default_dtype(torch.bfloat16)
    assert [event.dtype for event in RECORD.default_dtype_events] == [torch.bfloat16, torch.float32]
    assert find_recorded_default_dtype_setter([], torch.float32) is None
    setter = find_recorded_default_dtype_setter([], torch.bfloat16)
    assert setter.text == "torch.set_default_dtype(dtype)"
    RECORD.remove()
    assert torch.set_default_dtype is original.__wrapped__


def test_modules_are_not_kept_alive():
    model = nn.Linear(2, 2)
    assert len(RECORD._events) == 1
    del model
    gc.collect()
    assert len(RECORD._events) == 0


def test_equal_functions_of_two_files_keep_their_places(tmp_path):
    source = "from torch import nn\n\ndef build():\n    return nn.Linear(2, 2).half()\n"
    places = []
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(source)
        variables = {}
        exec(compile(source, str(tmp_path / name), "exec"), variables)
        model = variables["build"]()
        places.append(find_recorded_origin(model.modules(), torch.float16).location)
    assert [Path(place.rpartition(":")[0]).name for place in places] == ["first.py", "second.py"]
