"""What the repository around a file decides: nobody meets a scenario that a repository which runs its models itself never brings about."""

import json

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.doctor.lint.command import lint_command
from isotype.doctor.lint.rule import all_rules
from isotype.errors import UsageError
from isotype.finding import Severity

SPEAKING = [code for code, rule in all_rules().items() if rule.on or rule.by_name]
UNDER_AUTOCAST = """import torch


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x
"""
DECORATED = """import torch


class Other(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return x
"""
IN_BF16 = """import torch
from torch import nn


class Attention(nn.Module):
    def forward(self, q, k, v):
        mask = torch.full((q.shape[-2], k.shape[-2]), float("-inf"), device=q.device).triu(1)
        return torch.softmax(q @ k.mT + mask, dim=-1) @ v
"""
ROTARY = """import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(t, self.inv_freq)
        return angles.cos(), angles.sin()
"""
NORM = """import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)
"""
ROTARY_UNDER_AUTOCAST = """import torch


def rotary(position_ids, inv_freq):
    angles = torch.einsum("i,j->ij", position_ids.float(), inv_freq.float())
    return angles.cos(), angles.sin()
"""
MODEL = """from .rotary import Rotary


class Model:
    {kept}

    def __init__(self):
        self.rotary_emb = Rotary(64)
"""
SPECTRAL = """

class Mixer(nn.Module):
    def forward(self, x):
        if x.ndim != 3:
            raise ValueError
        return torch.fft.rfft(x, dim=1).real
"""
LOOP = """def fit(model, optimizer, batches):
    for batch in batches:
        model(batch).backward()
        optimizer.step()
"""
LOW = "import torch\n\n\ndef load(model):\n    return model.to(torch.bfloat16)\n"
REGION = "import torch\n\n\ndef run(model, x):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        return model(x)\n"
OFF = REGION.replace("dtype=torch.bfloat16", "enabled=False")
INFER = "import torch\n\n\n@torch.no_grad()\ndef run(model, x):\n    return model(x)\n"
USERS = "names = [Project.apply, Attention, Rotary, RMSNorm, rotary]\n"


@pytest.fixture
def told(tmp_path):
    """Codes told of a project of these files, and of some more that say nothing."""

    def lint(files, **options):
        (tmp_path / "pyproject.toml").touch()
        for name, text in {**{f"plain{i}.py": "import torch\n" for i in range(6)}, "users.py": USERS, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return [(f.code, f.severity, dict(f.details)["evidence"]) for f in lint_command([tmp_path], select=SPEAKING, **options).findings]

    return lint


def codes(found):
    return [code for code, _, _ in found]


def test_a_library_is_used_by_others(told):
    files = {"function.py": UNDER_AUTOCAST, "attention.py": IN_BF16, "low.py": LOW}
    assert codes(told(files)) == ["LT007"], "nothing shows that its users open autocast regions"
    assert codes(told(files | {"other.py": DECORATED})) == ["LT007", "LT002"]


def test_a_trainer_without_autocast(told):
    files = {"function.py": UNDER_AUTOCAST, "attention.py": IN_BF16, "low.py": LOW, "loop.py": LOOP}
    assert codes(told(files)) == ["LT007"]
    found = told(files, possible=True)
    assert [(c, s) for c, s, _ in found] == [("LT007", Severity.WARNING), ("LT002", Severity.NOTE)]
    assert found[1][2] == "possible: this repository runs its models itself, and opens no autocast region"


@pytest.mark.parametrize(
    "text", [REGION, "from transformers import TrainingArguments\n", "import torch\n\nscaler = torch.amp.GradScaler()\n"]
)
def test_a_trainer_that_reckons_with_autocast(told, text):
    assert codes(told({"function.py": UNDER_AUTOCAST, "loop.py": LOOP, "autocast.py": text})) == ["LT002"]


def test_a_trainer_that_casts_no_model(told):
    assert codes(told({"attention.py": IN_BF16, "loop.py": LOOP, "autocast.py": REGION.replace(", dtype=torch.bfloat16", "")})) == []


def test_examples_are_no_trainers_and_show_what_users_do(told):
    files = {"function.py": UNDER_AUTOCAST, "other.py": DECORATED, "examples/loop.py": LOOP}
    assert codes(told(files | {"low.py": LOW})) == ["LT002"]
    assert codes(told({"attention.py": IN_BF16, "low.py": "", "examples/loop.py": LOOP + LOW})) == ["LT007", "LT002"]


def test_a_demonstration_in_a_module_is_no_trainer(told):
    demonstration = "import torch\n\nif __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
    assert codes(told({"function.py": UNDER_AUTOCAST, "other.py": DECORATED, "demonstration.py": demonstration, "low.py": LOW})) == [
        "LT002"
    ]


def test_an_engine_has_copied_the_line_that_switches_autocast_off(told):
    engine = {f"model{i}.py": INFER for i in range(10)} | {"low.py": LOW, "off.py": OFF}
    assert codes(told({"function.py": UNDER_AUTOCAST, **engine})) == []
    assert codes(told({"function.py": UNDER_AUTOCAST, **engine, "off.py": REGION})) == ["LT002"]


def test_an_inference_engine_is_no_evidence_for_autocast(told):
    engine = {f"model{i}.py": INFER for i in range(10)} | {"other/run.py": REGION}
    assert codes(told({"one/function.py": UNDER_AUTOCAST, **engine})) == []
    assert codes(told({"one/function.py": UNDER_AUTOCAST, **engine, "one/run.py": REGION})) == ["LT002"]


def test_nothing_is_low(told):
    assert codes(told({"attention.py": IN_BF16})) == []
    assert codes(told({"function.py": UNDER_AUTOCAST, "other.py": DECORATED})) == ["LT002"], (
        "a library's module may be put under autocast all the same"
    )


def test_a_benchmark_chooses_its_dtypes(told):
    program = UNDER_AUTOCAST + "\n\nif __name__ == '__main__':\n    Project.apply(1, 2)\n"
    assert codes(told({"benchmarks/function.py": program, "low.py": LOW})) == []
    assert codes(told({"benchmarks/function.py": program + "    # under autocast\n", "low.py": LOW, "other.py": DECORATED})) == ["LT002"]
    assert codes(told({"benchmarks/function.py": UNDER_AUTOCAST, "low.py": LOW})) == ["LT002"]


@pytest.mark.parametrize("kept", ['_keep_in_fp32_modules = ["inv_freq"]', '_keep_in_fp32_modules_strict: list = ["norm", "rotary_emb"]'])
def test_a_model_keeps_the_frequencies_in_fp32(told, kept):
    files = {"one/rotary.py": ROTARY, "one/model.py": MODEL.format(kept=kept), "low.py": LOW}
    assert codes(told(files)) == []
    assert told(files, possible=True)[0][2].startswith("possible: a model beside it keeps ")
    assert codes(told({**files, "one/model.py": MODEL.format(kept='_keep_in_fp32_modules = ["norm"]')})) == ["LT008"]
    assert codes(told({"one/rotary.py": ROTARY, "other/model.py": MODEL.format(kept=kept), "one/model.py": ""})) == ["LT008"]


@pytest.mark.parametrize(("cast", "expected"), [("", []), (".float()", ["LT007"])])
def test_a_model_with_a_fourier_transform_of_its_inputs_is_never_in_bf16(told, cast, expected):
    assert codes(told({"attention.py": IN_BF16 + SPECTRAL.replace("rfft(x", f"rfft(x{cast}"), "low.py": LOW})) == expected


def test_a_lone_file_is_judged_by_itself(tmp_path):
    (tmp_path / "attention.py").write_text(IN_BF16)
    assert [f.code for f in lint_command([tmp_path / "attention.py"]).findings] == ["LT007"]


def test_the_folder_named_is_the_repository_of_a_package_without_a_project(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    files = {"__init__.py": "from .function import Project\n", "function.py": UNDER_AUTOCAST, "other.py": DECORATED}
    files |= {f"a{i}.py": "" for i in range(5)}
    for name, text in files.items():
        (package / name).write_text(text)
    (tmp_path / "train.py").write_text(LOOP + LOW)
    assert [f.code for f in lint_command([package], select=SPEAKING).findings] == ["LT002"]
    assert [f.code for f in lint_command([tmp_path], select=SPEAKING).findings] == []


@pytest.mark.parametrize("name", ["test_attention.py", "attention_test.py", "conftest.py"])
def test_tests_fix_their_own_dtypes(told, name):
    assert codes(told({name: IN_BF16, "low.py": LOW})) == []
    assert codes(told({name: "", "reference.py": "import pytest\n" + IN_BF16, "low.py": LOW})) == []


def test_a_suppression_of_an_unprinted_finding_counts_as_used(told):
    text = IN_BF16.replace(".triu(1)", ".triu(1)  # isotype: ignore[LT007] fp32 only")
    assert codes(told({"attention.py": text})) == []


def test_the_option_and_the_setting(tmp_path):
    for i in range(6):
        (tmp_path / f"plain{i}.py").touch()
    (tmp_path / "attention.py").write_text(IN_BF16)
    (tmp_path / "pyproject.toml").write_text("[tool.isotype.lint]\npossible = true\n")
    result = CliRunner().invoke(build_app(), ["lint", str(tmp_path), "--select", "LT007", "--json"])
    assert [f["severity"] for f in json.loads(result.stdout)["findings"]] == ["note"]
    assert result.exit_code == 0
    (tmp_path / "pyproject.toml").write_text("[tool.isotype.lint]\n")
    assert "note LT007" in CliRunner().invoke(build_app(), ["lint", str(tmp_path), "--select", "LT007", "--possible"]).stdout
    (tmp_path / "pyproject.toml").write_text("[tool.isotype.lint]\npossible = 1\n")
    with pytest.raises(UsageError, match=r"lint\.possible: expected true or false, got 1"):
        lint_command([tmp_path])


def test_a_program_that_runs_a_trained_model(told):
    program = (
        "import argparse\nimport torch\n\n\n@torch.inference_mode()\ndef run(model, path):\n    model.load_state_dict(torch.load(path))\n"
    )
    files = {"function.py": ROTARY_UNDER_AUTOCAST, "low.py": LOW}
    assert codes(told({**files, "run.py": program})) == []
    files |= {"run.py": program + "    model(1).backward()\n"}
    assert codes(told(files)) == []
    assert told(files, possible=True)[0][2].endswith("but nothing here shows fp32 inputs under bf16 autocast")
    assert codes(told({**files, "region.py": REGION})) == ["LT008"]


def test_files_that_say_what_they_are_for(told):
    files = {"run.py": REGION, "low.py": LOW}
    assert codes(told({**files, "engine/inference.py": UNDER_AUTOCAST})) == []
    assert codes(told({**files, "engine/inference.py": UNDER_AUTOCAST + "\n\n# under autocast\n"})) == ["LT002"]
    (name,) = {but for _, _, but in told({"engine/inference.py": "", "pkg/reference/attention.py": IN_BF16}, possible=True)}
    assert name == "possible: a reference computes in the dtypes that its tests choose"
    assert codes(told({"pkg/reference/attention.py": "", "pkg/attention.py": IN_BF16})) == ["LT007"]
    assert codes(told({"pkg/attention.py": "", "examples/norm.py": NORM, "pkg/norm.py": ""})) == []
    assert codes(told({"examples/norm.py": "", "pkg/norm.py": NORM})) == []
    wide = {"quantised.py": "from peft import prepare_model_for_kbit_training\n"}
    assert codes(told(wide)) == [], "LT009 is off by default"
    assert codes(told(wide, extend_select=["LT009"])) == ["LT009"]


def test_norms_of_a_trainer_that_keeps_no_weights_in_fp32(told):
    files = {"norm.py": NORM, "loop.py": LOOP, "low.py": LOW, "run.py": REGION}
    assert codes(told(files)) == []
    wide = {"quantised.py": "from peft import prepare_model_for_kbit_training\n"}
    assert codes(told({**files, **wide}, extend_select=["LT009"])) == ["LT009"]


def test_a_docstring_is_no_evidence(told):
    """ "Never model.half()" is no cast of a model."""
    promise = 'import torch\n\nx = torch.bfloat16\n"""Parameters stay in fp32\nin every mode: never model.half().\n"""\n'
    assert codes(told({"attention.py": IN_BF16, "policy.py": promise})) == []
    assert codes(told({"attention.py": IN_BF16, "policy.py": LOW})) == ["LT007"]


def test_nothing_uses_it(told):
    """A class that no file names, and that no caller can be seen of, is only possible."""
    files = {"attention.py": IN_BF16, "low.py": LOW, "users.py": ""}
    assert codes(told(files)) == []
    assert told(files, possible=True)[0][2] == "possible: nothing in this repository uses Attention"
    ((_, _, evidence),) = told({**files, "users.py": "from attention import Attention\n"})
    assert evidence == "reached: users.py:1 uses Attention; low.py:5 casts a model to a low precision"


ANGLES = """import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))

    def forward(self, n):
        t = torch.arange(n, device=self.inv_freq.device).type_as(self.inv_freq)
        return torch.einsum("i,j->ij", t, self.inv_freq)
"""
TABLE = """import torch
from torch import nn


def table(n, inv_freq):
    angles = torch.einsum("i,j->ij", torch.arange(n).float().to(inv_freq.device), inv_freq)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Rotary(nn.Module):
    def __init__(self, n, inv_freq):
        super().__init__()
        self.table = table(n, inv_freq)

    def forward(self, x):
        return x + {used}
"""


def test_angles_that_leave_under_autocast(told):
    assert codes(told({"rotary.py": ANGLES, "run.py": REGION})) == ["LT008"]


@pytest.mark.parametrize(("used", "expected"), [("self.table", []), ("table(8, self.inv_freq)", ["LT008"])])
def test_a_table_built_in_a_constructor_is_outside_autocast(told, used, expected):
    assert codes(told({"rotary.py": TABLE.format(used=used), "run.py": REGION})) == expected


def test_a_default_dtype_with_a_name(told):
    text = """import torch

DEFAULT = torch.float32


def timestep_embedding(timesteps, dim, dtype={default}):
    return torch.outer(timesteps.ravel().to(dtype), torch.exp(-torch.arange(dim, dtype=dtype, device=timesteps.device))).cos()


x = timestep_embedding(1, 2)
"""
    assert codes(told({"time.py": text.format(default="DEFAULT"), "low.py": LOW})) == []
    assert codes(told({"time.py": text.format(default="torch.bfloat16"), "low.py": LOW})) == ["LT008"]


def test_a_file_named_reference_chooses_its_dtypes(told):
    assert codes(told({"kernels/reference.py": UNDER_AUTOCAST, "run.py": REGION})) == []


ATTEND = """import torch
import torch.nn.functional as F


def attend(query, key, value):
    weights = F.softmax(query @ key.mT, dim=-1, dtype=torch.float32)
    {comment}
    return weights @ value
"""
CALLER = """import torch
from .attention import attend


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        query, key, value = query{cast}, key{cast}, value{cast}
        return attend(query, key, value)


def load(model):
    return model.to(torch.bfloat16)
"""


@pytest.mark.parametrize(("cast", "expected"), [("", {"LT018"}), (".float()", set())])
def test_callers_of_another_file_cast_what_they_hand_over(tmp_path, cast, expected):
    folder = tmp_path / "package"
    folder.mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name, text in (("__init__", ""), ("attention", ATTEND.format(comment="")), ("model", CALLER.format(cast=cast))):
        (folder / f"{name}.py").write_text(text)
    assert {f.code for f in lint_command([tmp_path], select=SPEAKING).findings} == expected


@pytest.mark.parametrize(
    ("comment", "expected"), [("", {"LT018"}), ("# what is lost here", {"LT018"}), ("# fp32 on purpose, to match the paper", set())]
)
def test_a_comment_that_states_the_intent(tmp_path, comment, expected):
    (tmp_path / "attention.py").write_text(ATTEND.format(comment=comment))
    assert {f.code for f in lint_command([tmp_path / "attention.py"]).findings} == expected


RUNS_IT_IN_BF16 = """import torch
from package.attention import attend


def test_attend():
    q = torch.randn(2, 4, 8{dtype})
    assert {asserted}
"""


@pytest.mark.parametrize(
    ("dtype", "asserted", "expected"),
    [
        ("", "attend(q, q, q).shape == q.shape", {"LT018"}),
        ("", "attend(q, q, q).dtype == torch.float32", set()),
        (", dtype=torch.bfloat16", "attend(q, q, q).shape == q.shape", set()),
        (", dtype=torch.bfloat16", "q.shape", {"LT018"}),
    ],
)
def test_a_test_that_states_the_intent(tmp_path, dtype, asserted, expected):
    """A test that asserts the dtype of what the function gives, or that runs it in bf16, speaks against a finding."""
    package, tests = tmp_path / "package", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name, text in (("__init__", ""), ("attention", ATTEND.format(comment="")), ("model", CALLER.format(cast=""))):
        (package / f"{name}.py").write_text(text)
    (tests / "test_attention.py").write_text(RUNS_IT_IN_BF16.format(dtype=dtype, asserted=asserted))
    assert {f.code for f in lint_command([tmp_path], select=SPEAKING).findings} == expected


WITHOUT_A_CAST = CALLER.format(cast="").partition("\n\ndef load")[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", set()),
        ("dtype: fp32\n", set()),
        ("dtype: bf16\n", {"LT018"}),
    ],
)
def test_a_configuration_file_asks_for_weights_in_bf16(tmp_path, settings, expected):
    """torchtune's recipe in the same repository loads the model in that dtype; nothing in the Python files names one."""
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name, text in (("__init__", ""), ("attention", ATTEND.format(comment="")), ("model", WITHOUT_A_CAST)):
        (package / f"{name}.py").write_text(text)
    recipe = "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\nmodel:\n  _component_: package.model.Attention\n"
    recipe += "checkpointer:\n  _component_: torchtune.training.FullModelHFCheckpointer\nepochs: 1\n"
    (tmp_path / "recipe.yaml").write_text(recipe + settings)
    (tmp_path / "broken.json").write_text('{"bf16": ')
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "missing.json")
    found = lint_command([tmp_path], select=SPEAKING).findings
    assert {f.code for f in found} == expected
    assert all("recipe.yaml:8" in str(f.details) for f in found)


TABLE_OF_A_DTYPE = """import torch


def table(n, dim, device, dtype):
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)
    angles = torch.outer(torch.arange(n, device=device, dtype=dtype), frequencies)
    return angles.cos(), angles.sin()
"""
BUILDER = """import torch
from . import rope


class Attention(torch.nn.Module):
    def forward(self, x):
        return rope.table(x.shape[1], 64, x.device, {dtype})


def load(model):
    return model.to(torch.bfloat16)
"""


@pytest.mark.parametrize(("dtype", "expected"), [("x.dtype", {"LT008"}), ("torch.float32", set())])
def test_who_is_handed_a_dtype_is_asked_of_the_callers(tmp_path, dtype, expected):
    folder = tmp_path / "package"
    folder.mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name, text in (("__init__", ""), ("rope", TABLE_OF_A_DTYPE), ("model", BUILDER.format(dtype=dtype))):
        (folder / f"{name}.py").write_text(text)
    assert {f.code for f in lint_command([tmp_path], select=SPEAKING).findings} == expected


BUILDS_A_LAYER = "    def __init__(self):\n        super().__init__()\n        self.out = nn.Linear(8, 8)\n\n"
CLASS_WITH_WEIGHTS = IN_BF16.replace("    def forward", BUILDS_A_LAYER + "    def forward")


@pytest.mark.parametrize(
    ("attention", "other", "expected"),
    [
        (IN_BF16, "model = AutoModel.from_pretrained(name, dtype=torch.bfloat16)", ["LT007"]),
        (IN_BF16, "model = AutoModel.from_pretrained(name, dtype=torch.float32)", []),
        (IN_BF16, "model = AutoModel.from_pretrained(name, torch_dtype=torch.float32)", []),
        (IN_BF16, "def from_config(config, dtype=None):\n    pass", []),
        (IN_BF16, "model = build_from_config(\n    config,\n    autocast_dtype=torch.bfloat16,\n)", []),
        (IN_BF16, "def build_from_config(config, autocast_dtype: torch.dtype = torch.float32):\n    pass", []),
        (IN_BF16, "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)", []),
        (CLASS_WITH_WEIGHTS, "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)", ["LT007"]),
    ],
)
def test_what_casts_a_model(told, attention, other, expected):
    """Definitions, fp32 written out, and FSDP's policy for a module that holds nothing to shard, are no evidence of a model in bf16."""
    found = told({"attention.py": attention, "low.py": f"import torch\n\n{other}\nlow = torch.bfloat16\n"})
    assert codes(found) == expected, found


ASKS_CUDA = """import torch


def cast(tensor):
    if torch.is_autocast_enabled():
        return tensor.to(torch.get_autocast_gpu_dtype() if tensor.is_cuda else torch.get_autocast_cpu_dtype())
    return tensor
"""


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        ("with torch.autocast('cuda', dtype=torch.bfloat16): ...", []),
        ("with torch.autocast(device_type='cuda', dtype=torch.bfloat16): ...", []),
        ("with torch.autocast(device_type=x.device.type, enabled=False): ...", []),
        ("with torch.autocast('cpu', dtype=torch.bfloat16): ...", ["LT011"]),
        ("with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16): ...", ["LT011"]),
        ("region = torch.cuda.amp.autocast if gpu else torch.cpu.amp.autocast", ["LT011"]),
    ],
)
def test_a_question_about_cuda_matters_where_a_cpu_has_autocast(told, region, expected):
    assert codes(told({"cast.py": ASKS_CUDA, "run.py": f"import torch\n\n{region}\n"})) == expected
