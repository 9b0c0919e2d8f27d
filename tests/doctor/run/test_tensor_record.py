"""The record of `doctor run --trace`: the call that gave each tensor its dtype."""

import subprocess
import sys
import textwrap
import traceback

import numpy as np
import pytest
import torch
from torch import nn

from tests.api import (
    RECORD,
    collect_evidence,
    decide_cause,
    find_recorded_producer,
    remove_record_frames,
)
from tests.warm import interpreter

DOUBLE = nn.Linear(4, 4).double()


@pytest.fixture(autouse=True)
def record():
    RECORD.record_tensors()
    yield RECORD.tensors
    RECORD.remove()


class Names:
    def __init__(self, model=None):
        self.paths = {} if model is None else {p: name for name, p in model.named_parameters()}

    def tensor_path(self, tensor):
        return self.paths.get(tensor)


def producer_of(tensor, model=None):
    return find_recorded_producer(tensor, [], Names(model))


def widen(x):
    return x.to(torch.float32)


def load_table():
    return torch.from_numpy(np.linspace(0, 1, 4))


class Batches(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return {"values": np.ones(4), "weight": 0.5}

    def __len__(self):
        return 2


class Buffer:
    def __init__(self, size):
        self.rows = np.zeros((size, 2))

    def sample(self, index):
        return torch.as_tensor(self.rows[index])

    def sample_pair(self, index):
        following = [row + 1 for row in index]
        return torch.as_tensor(self.rows[index]), torch.as_tensor(self.rows[following])


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Scale.gradient = gradient.double()
        return gradient * 2


def test_cast_in_a_function_that_has_returned():
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    result = producer_of(widen(x).reshape(4, 2).softmax(-1)[0])
    assert (result.kind, result.text) == ("cast", "x.to(torch.float32)")
    assert result.function == "widen"
    assert result.location.endswith(f":{widen.__code__.co_firstlineno + 1}")


def test_data_of_numpy_through_a_later_pass_of_a_loop():
    x = torch.ones(4)
    table = load_table()
    for step in range(3):
        x = x + table[step] * torch.ones(4, dtype=torch.float64)
    result = producer_of(x)
    assert (result.kind, result.text) == ("creation", "torch.from_numpy(np.linspace(0, 1, 4))")
    reason = "its data is a NumPy array of float64: NumPy computes `np.linspace(0, 1, 4)` ("
    assert result.reason.startswith(reason)
    assert [(p.operation, p.operand) for p in result.promotions] == [
        ("Add", "table[step] * torch.ones(4, dtype=torch.float64)")
    ]


def test_array_that_another_method_stored():
    result = producer_of(Buffer(4).sample([1, 2]))
    assert result.text == "torch.as_tensor(self.rows[index])"
    reason = "its data is a NumPy array of float64: NumPy computes `np.zeros((size, 2))` ("
    assert result.reason.startswith(reason)
    assert producer_of(torch.as_tensor(np.zeros(2), dtype=torch.float32)).reason == ""


def test_batch_of_a_loader_names_the_loop_and_the_line_inside():
    for batch in torch.utils.data.DataLoader(Batches(), batch_size=2):
        result = producer_of(batch["values"])
    assert result.kind == "creation"
    assert result.reason == "its data is a NumPy array of float64"


def test_weight_that_widens_a_value_is_named_by_its_path():
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(4, dtype=torch.bfloat16)
    result = producer_of(x * model[0].weight, model)
    assert (result.kind, result.path) == ("parameter", "0.weight")
    assert result.reason.startswith("it computes with 0.weight, which is fp32: `nn.Linear(4, 4)` (")


def test_copy_of_a_weight_from_before_its_cast():
    model = nn.Sequential(nn.Linear(4, 4))
    copy = model[0].weight.detach().clone()
    model.half()
    text = producer_of(copy, model).describe("fp32")
    assert text.startswith(
        "it keeps fp32, the dtype of 0.weight before `model.half()` made it fp16"
    )


LIBRARY = """
from torch import nn

def match(x, example):
    return x.to(example.dtype)

def prepare_model_for_kbit_training(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model

class Norm(nn.Module):
    def forward(self, x):
        dtype = x.dtype
        return nn.functional.normalize(x.float()).to(dtype)

class Embed(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.scale.to(self.weight.dtype)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = Embed(4, 4), nn.Linear(4, 4)
        self.embed.original = nn.Embedding(4, 4)  # as PEFT keeps it
        self.embed.register_buffer("scale", self.head.weight[0].detach())

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


def load_library(folder):
    file = folder / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    library = {"__name__": "library"}
    exec(compile(LIBRARY, str(file), "exec"), library)
    return library


def test_casts_of_a_library_lead_to_the_line_that_decided_the_dtype(tmp_path):
    library = load_library(tmp_path)
    rows = torch.ones(2, 4).half()
    for tensor in (library["Norm"]()(rows), library["match"](torch.zeros(4), rows)):
        assert producer_of(tensor).text == "torch.ones(2, 4).half()"
    table = library["match"](torch.zeros(4).half(), rows)  # has the dtype already
    assert producer_of(table).text == "torch.ones(2, 4).half()"


def test_norm_that_a_library_casts_by_assignment_names_the_users_call(tmp_path):
    prepare = load_library(tmp_path)["prepare_model_for_kbit_training"]
    norm = prepare(nn.LayerNorm(4).half())
    cause = explain_failure(
        lambda weight: norm(torch.ones(2, 4)) @ weight.half(), DOUBLE.weight
    ).cause
    assert "`prepare(nn.LayerNorm(4).half())` (" in cause
    assert "made the weights of norm fp32" in cause


def test_weight_whose_dtype_a_library_takes_over_is_changed_at_the_users_line(tmp_path):
    model = load_library(tmp_path)["Model"]().half()
    for name, parameter in model.named_parameters():
        if name == "embed.weight":
            parameter.data = parameter.data.float()
    finding = explain_failure(model, torch.arange(2))
    assert "embed.weight is fp32, and so is what the model computes with it" in finding.cause
    assert "leave embed.weight out of `parameter.data = parameter.data.float()`" in finding.fix


def test_quotient_of_integers():
    lengths = torch.tensor([3, 4])
    result = producer_of((lengths / 2).unsqueeze(0))
    assert (result.text, result.reason) == ("lengths / 2", "it computes floats from int64")


def divide_counts():
    counts = torch.arange(1, 5)
    return counts / counts.sum()


def test_cast_that_changed_nothing_is_not_the_origin():
    model = nn.Linear(4, 4).bfloat16()
    x = divide_counts().float()
    with pytest.raises(RuntimeError) as caught:
        model(x)
    cause = decide_cause(collect_evidence(caught.value)).cause
    assert "`counts / counts.sum()`" in cause
    assert "because it computes floats from int64" in cause
    array = {"x": torch.as_tensor(np.ones(4)).double()}
    with pytest.raises(RuntimeError) as caught:
        model(array["x"])
    finding = decide_cause(collect_evidence(caught.value))
    assert "its data is a NumPy array of float64" in finding.cause
    assert "as_tensor" not in finding.fix  # the cast after it would make fp64 again


def test_cast_to_the_dtype_of_another_tensor_names_what_made_that_one():
    table = torch.ones(4).double()
    mask = torch.ones(4).to(table.dtype)
    result = producer_of(mask)
    assert result.text == "torch.ones(4).to(table.dtype)"
    assert result.reason.startswith("`torch.ones(4).double()` (")


def make_like(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


class Layer:
    def __init__(self, module):
        self.module = module

    def start(self):
        dtype = self.module.weight.dtype
        return make_like((2,), dtype)


def test_dtype_argument_leads_to_the_tensor_whose_dtype_a_caller_passes():
    module = nn.Linear(4, 4)
    module.weight.data = module.weight.data.half()
    result = producer_of(Layer(module).start(), module)
    assert result.text == "torch.zeros(shape, dtype=dtype)"
    assert result.reason.startswith(
        "weight is fp16: `module.weight.data = module.weight.data.half()` ("
    )


def test_operation_of_two_halves_names_what_made_both():
    narrow, brain = torch.ones(4).half(), torch.ones(4).bfloat16()
    reason = producer_of(torch.cat([narrow, brain])).reason
    assert reason.startswith("fp16 with bf16 gives fp32: `torch.ones(4).half()` (")
    assert "is fp16 and `torch.ones(4).bfloat16()` (" in reason


def test_input_of_a_layer_decides_and_a_parameter_before_a_constant():
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    hidden = nn.functional.linear(torch.ones(4) + widen(x), torch.ones(4, 4).double().float())
    assert producer_of(hidden).text == "x.to(torch.float32)"
    table = nn.Linear(4, 4)
    assert producer_of(torch.eye(4) + table.weight, table).path == "weight"


def test_autocast_names_the_region_that_another_function_entered():
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    region.__enter__()
    entered_at = sys._getframe().f_lineno - 1
    try:
        result = producer_of(nn.Linear(4, 4)(torch.ones(1, 4)))
    finally:
        region.__exit__(None, None, None)
    assert result.kind == "autocast"
    assert result.reason.startswith("it runs under autocast (")
    assert result.reason.endswith(f":{entered_at})")


def test_functions_in_backward_are_recorded():
    x = torch.ones(2, requires_grad=True)
    Scale.apply(x).sum().backward()
    assert producer_of(Scale.gradient).text == "gradient.double()"
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_record_keeps_no_tensor_alive(record):
    for _ in range(50):
        x = torch.ones(2).double() + 1
    del x
    assert len(record._events) == 0


def fail_on_values_that_no_variable_holds():
    table = nn.ParameterDict({"mix": nn.Parameter(torch.rand(1, dtype=torch.float64))})
    x = torch.zeros(3, dtype=torch.float16)
    return x.lerp(x + 1, weight=widen(table["mix"]))


def fail_under_a_region_of_an_object():
    class Region:
        def __init__(self):
            self.region = torch.autocast("cpu", dtype=torch.bfloat16)

    region = Region().region
    region.__enter__()
    try:
        scores = torch.ones(2, 4) @ torch.ones(4, 4)
        out = torch.zeros(2, 4)
        out[:1] = torch.zeros(2, 4).index_put((torch.tensor([0]),), scores[:1])[:1]
    finally:
        region.__exit__(None, None, None)


def multiply(is_wide):
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    value = torch.ones(1, 4).sqrt()
    if is_wide():  # the source code does not show the result
        value = x.to(torch.float32)
    return nn.functional.linear(value, x)


def test_line_of_the_source_code_that_did_not_run_is_not_named():
    with pytest.raises(RuntimeError) as failure:
        multiply(lambda: False)
    remove_record_frames(failure.value)
    cause = decide_cause(collect_evidence(failure.value)).cause
    assert cause.startswith("`torch.ones(1, 4)` is fp32 (")
    assert "x.to(torch.float32)" not in cause


@pytest.mark.parametrize(
    ("fail", "operands", "autocast", "cause"),
    [
        (
            fail_on_values_that_no_variable_holds,
            {"x": "fp16[3]", "x + 1": "fp16[3]", "widen(table['mix'])": "fp32[1]"},
            "off",
            "`x.to(torch.float32)` is fp32 (",
        ),
        (
            fail_under_a_region_of_an_object,
            {"scores[:1]": "bf16[1 4]"},
            "on, bf16, since ",
            "`torch.ones(2, 4) @ torch.ones(4, 4)` (",
        ),
    ],
)
def test_failed_function_shows_what_it_received(fail, operands, autocast, cause):
    with pytest.raises(RuntimeError) as failure:
        fail()
    remove_record_frames(failure.value)
    evidence = collect_evidence(failure.value)
    finding = decide_cause(evidence)
    facts = evidence.to_dict()
    assert operands.items() <= facts["operands"].items()
    assert facts["autocast"].startswith(autocast)
    assert cause in finding.cause


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.arange(4, dtype=torch.int32))

    def forward(self, mask):
        return torch.bitwise_right_shift(self.codes, mask)


def explain_failure(function, *args):
    try:
        function(*args)
    except Exception as error:
        remove_record_frames(error)
        return decide_cause(collect_evidence(error))
    raise AssertionError("the call did not fail")


class AddProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.zeros(4, 2))
        self.right = nn.Parameter(torch.zeros(2, 4))

    def forward(self, weight):
        return torch.addmm(weight, self.left, self.right)


def test_parametrization_that_autocast_narrows_is_cast():
    """peft 3601: PyTorch's own check compares the result with the weight."""

    def register(layer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.utils.parametrize.register_parametrization(layer, "weight", AddProduct())

    finding = explain_failure(register, nn.Linear(4, 4))
    assert finding.code == "RN020", finding.render()
    expression = "torch.addmm(weight, self.left, self.right)"
    assert f"autocast, which is on, computes `{expression}` in bf16" in finding.cause
    assert finding.fix.startswith(f"`{expression}.to(torch.float32)` at ")


def test_arrays_of_one_function_are_cast_together():
    def update(model, buffer):
        rows, next_rows = buffer.sample([1, 2]), buffer.sample([2, 3])
        return model(next_rows) - model(rows)

    finding = explain_failure(update, nn.Linear(2, 2), Buffer(4))
    assert "self.rows[index].to(torch" not in finding.fix  # one call made both

    def update_pair(model, buffer):
        rows, next_rows = buffer.sample_pair([1, 2])
        return model(next_rows) - model(rows)

    finding = explain_failure(update_pair, nn.Linear(2, 2), Buffer(4))
    assert finding.fix.startswith("`torch.as_tensor(self.rows[following]).to(torch.float32)` at")
    assert "and `torch.as_tensor(self.rows[index]).to(torch.float32)` at" in finding.fix


def test_cast_of_integer_buffers_is_named():
    model = Codes()
    for name, buffer in model.named_buffers():
        model._buffers[name] = buffer.to(torch.bfloat16)
    finding = explain_failure(model, torch.ones(4, dtype=torch.int32))
    assert finding.code == "RN014"
    assert "`buffer.to(torch.bfloat16)` (" in finding.cause
    assert "made codes bf16, which held integers" in finding.cause
    assert "leave integer tensors out of this cast" in finding.fix


def test_all_floats_of_an_operator_of_integers_are_cast():
    def join(mask, keep):
        return mask & keep

    finding = explain_failure(join, torch.ones(4), torch.ones(4))
    assert "`mask.to(torch.bool)`, and `keep.to(torch.bool)` at" in finding.fix


def test_cast_that_made_one_of_two_halves_is_changed():
    def attend(query, keys, new_keys):
        keys = torch.cat([keys.half(), new_keys])
        return nn.functional.scaled_dot_product_attention(query, keys, keys)

    query, keys = torch.ones(3, 4).bfloat16(), torch.ones(3, 4)
    finding = explain_failure(attend, query, keys, query)
    assert finding.fix.startswith("change the dtype to torch.bfloat16 in `keys.half()` at")


def test_float_in_a_product_of_quantised_matrices_is_named():
    def multiply(values, codes):
        return torch._int_mm(values, codes.t())

    codes = torch.ones(32, 32, dtype=torch.int8)
    finding = explain_failure(multiply, torch.ones(32, 32).bfloat16(), codes)
    assert "`values` is bf16, and _int_mm multiplies matrices of quantised values" in finding.cause
    assert finding.fix.startswith("`values.to(torch.int8)` at")


def test_indices_and_not_the_indexed_tensor_are_named():
    def select(values, rows):
        return values.index_select(0, rows)

    def index(values, rows):
        return values[rows]

    for read in (select, index):
        finding = explain_failure(read, torch.ones(3, 4), torch.zeros(2, dtype=torch.int16))
        assert "`rows` is int16" in finding.cause
        assert finding.fix.startswith("`rows.long()` at")


def test_traceback_does_not_contain_the_record():
    try:
        nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(2).int())
    except RuntimeError:
        error = sys.exc_info()[1]
    remove_record_frames(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names == ["test_traceback_does_not_contain_the_record", "cross_entropy"]


def test_command(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch

            class Table:
                def __init__(self, size):
                    self.rows = [torch.arange(size) / 2 for _ in range(2)]

                def read(self, index):
                    return self.rows[index]

            model = torch.nn.Linear(4, 4).bfloat16()
            print(model(Table(4).read(1)))
            """
        )
    )

    def run(*options):
        command = [interpreter(), "-m", "isotype.doctor", "run", *options, str(program)]
        return subprocess.run(command, capture_output=True, text=True)

    plain, traced = run(), run("--trace")
    assert (plain.returncode, traced.returncode) == (1, 1)
    assert traced.stderr == plain.stderr
    assert "isotype/doctor" not in plain.stderr
    assert "`torch.arange(size) / 2` (" in plain.stderr
    assert "because it computes floats from int64" in plain.stderr


def test_program_that_ends_because_nothing_was_compiled(tmp_path):
    program = tmp_path / "compiled.py"
    program.write_text("import torch\nprint(torch.compile(torch.sin)(torch.zeros(1)))\n")
    command = [interpreter(), "-m", "isotype.doctor", "run", "--trace", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "tensor([0.])\n")
    assert "code for torch.compile runs eagerly. No error ended the program" in result.stderr


class Replay:
    """A buffer of NumPy's fp64, of which each batch is read by two networks of fp32."""

    states = np.ones((8, 4))

    def sample(self):
        return torch.tensor(self.states[:2])


def test_fp64_is_mended_where_it_is_made_since_other_lines_read_it_too():
    actor = nn.Linear(4, 1)
    with pytest.raises(RuntimeError) as caught:
        actor(Replay().sample())
    finding = decide_cause(collect_evidence(caught.value))
    assert finding.fix.startswith("`torch.tensor(self.states[:2], dtype=torch.float32)` at")


def test_destination_of_a_write_gets_the_dtype_of_the_model():
    layer = nn.Linear(4, 4).double()

    def scatter(rows):
        output = torch.zeros(4, 4)
        output[torch.arange(2)] = layer(rows)

    with pytest.raises(RuntimeError) as caught:
        scatter(torch.ones(2, 4).double())
    remove_record_frames(caught.value)
    finding = decide_cause(collect_evidence(caught.value))
    assert "`torch.zeros(4, 4, dtype=torch.float64)` at" in finding.fix
