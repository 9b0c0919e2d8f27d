"""Computes in fp32 the answers that a server of the trained model should give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...data.chat import ChatTemplate, chat_template
from ...data.rows import IGNORE_INDEX, Row, SamplePrompt
from ...errors import UsageError
from ...model.served import round_frozen, serve_adapters
from ...precision.apply import use_generate_dtype
from ...tasks.language.sample import generation_config
from ..loaded import LoadedRun
from ..run_weights import RunWeights
from ..verify.measure import load_evaluation, row_source
from ..verify.reference import ReferenceModel
from .expectation import (
    ALTERNATIVES,
    ANSWER_TOKENS,
    PROMPTS,
    STOP_PROBES,
    Expectations,
    ExpectedAnswer,
    ScoredRow,
    SingleToken,
    choose_scored_positions,
)
from .server import Prompt

_SINGLE_TOKENS = 4  # prompts of one repeated token that are scored
_COMPARED_ALTERNATIVES = 5  # most probable tokens of each position, as many as servers return
_SYSTEM_TEXT = "Answer in one short sentence."
_QUESTION = "What is the weather in Oslo?"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Returns the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "The place."}},
                "required": ["place"],
            },
        },
    }
]
# variables of chat templates that switch thoughts on and off
_THINKING_SWITCHES = ("enable_thinking", "thinking")


def compute_expectations(run: LoadedRun, row_count: int) -> Expectations:
    """Returns the answers that a server of the trained model should give.

    row_count  the number of held-out rows, or of training rows if none are held out
    Raises     UsageError if the rows are missing, and for a run that was trained on pictures
    """
    rows, loaded = load_evaluation(run, row_count, prompt_count=PROMPTS)
    if loaded.pictures is not None:
        raise UsageError(f"{run.folder}: --served asks texts; this run learnt from pictures")
    if not loaded.prompts:
        raise UsageError(f"{run.folder}: its {row_source(loaded)} rows have no prompt to ask")
    tokenizer: Any = run.tokenizer
    template = chat_template(tokenizer, None) if tokenizer.chat_template else None
    prompts = [_build_prompt(tokenizer, template, prompt) for prompt in loaded.prompts]
    weights = RunWeights(run)
    reference = ReferenceModel(run, weights)
    config = generation_config(run.model, tokenizer, max_new_tokens=ANSWER_TOKENS)
    chosen = choose_scored_positions(rows)

    reference.fill(weights.trained)
    with reference.holding_weights():
        answer_ids = [_generate(reference, prompt.ids, config) for prompt in prompts]
        end_ids = frozenset(config.eos_token_id or ())
        scored = [_Scored(reference, row.input_ids, positions) for row, positions in chosen]
        answers = [
            _Scored(
                reference,
                (*prompt.ids, *ids),
                range(len(prompt.ids), len(prompt.ids) + len(ids)),
                alternatives=ALTERNATIVES,
            )
            for prompt, ids in zip(prompts, answer_ids)
        ]
        endings = _find_endings(reference, rows, end_ids)
        single_tokens = _score_single_tokens(reference, prompts)
    reference.fill(weights.base)
    with reference.holding_weights():
        for item in (*scored, *answers):
            item.score_base(reference)
    run_error = _measure_run_error(run, answers)
    return Expectations(
        answers=[
            ExpectedAnswer(
                prompt=prompt,
                ids=ids,
                text=tokenizer.decode(_strip_end_tokens(ids, end_ids), skip_special_tokens=True),
                texts=tuple(tokenizer.decode([index]) for index in ids),
                logprobs=item.logprobs,
                base_logprobs=item.base_logprobs,
                alternatives=item.alternatives,
                base_alternatives=item.base_alternatives,
                has_ended=bool(ids) and ids[-1] in end_ids,
            )
            for prompt, ids, item in zip(prompts, answer_ids, answers)
        ],
        rows=[
            ScoredRow(item.ids, item.positions, item.logprobs, item.base_logprobs)
            for item in scored
        ],
        endings=endings,
        single_tokens=single_tokens,
        system=_probe_system(tokenizer, template),
        tools=_probe_tools(tokenizer, template),
        thinking=_probe_thinking(tokenizer, template),
        first_id=tokenizer.bos_token_id,
        first_text=tokenizer.bos_token or "",
        end_ids=end_ids,
        longest=max(len(prompt.ids) + ANSWER_TOKENS for prompt in prompts),
        max_length=run.config.data.max_length,
        row_source=row_source(loaded),
        folder=str(run.folder),
        run_error=run_error,
    )


class _Scored:
    """Contains tokens whose log-probabilities are computed twice: by the trained model and by the
    base model.
    """

    def __init__(
        self,
        reference: ReferenceModel,
        ids: Sequence[int],
        positions: Sequence[int],
        *,
        alternatives: int = 0,
    ) -> None:
        self.ids = tuple(ids)
        self.positions = tuple(positions)
        table = _next_logprobs(reference, self.ids, self.positions)
        self.logprobs = self._select(table)
        self.base_logprobs: tuple[float, ...] = ()
        self.alternatives = tuple(_most_probable(row, alternatives) for row in table)
        self.base_alternatives: tuple[Mapping[int, float], ...] = ()

    def score_base(self, reference: ReferenceModel) -> None:
        table = _next_logprobs(reference, self.ids, self.positions)
        self.base_logprobs = self._select(table)
        self.base_alternatives = tuple(
            {token: float(row[token]) for token in alternatives}
            for row, alternatives in zip(table, self.alternatives)
        )

    def _select(self, table: Tensor) -> tuple[float, ...]:
        tokens = [self.ids[position] for position in self.positions]
        return tuple(float(row[token]) for row, token in zip(table, tokens))


@torch.no_grad()
def _measure_run_error(run: LoadedRun, answers: Sequence[_Scored]) -> float:
    """Returns the root mean square of the differences between the log-probabilities of the trained
    model in the run's own dtypes and in fp32, for the most probable tokens of each answer. Returns
    0 if the run computes in fp32.
    """
    if run.precision.generate == "fp32":
        return 0.0
    # this changes the model in place
    serve_adapters(run.model, round_frozen(run.model, run.precision))
    errors = []
    for answer in answers:
        with use_generate_dtype(run.model):
            table = _logprobs_of(run.model, run.device, answer.ids, answer.positions)
        for row, alternatives in zip(table, answer.alternatives):
            largest = list(alternatives.items())[:_COMPARED_ALTERNATIVES]
            errors += [float(row[token]) - value for token, value in largest]
    return math.sqrt(fmean(error**2 for error in errors)) if errors else 0.0


def _most_probable(logprobs: Tensor, count: int) -> Mapping[int, float]:
    values, indices = logprobs.topk(min(count, len(logprobs)))
    return dict(zip(indices.tolist(), values.tolist()))


@torch.no_grad()
def _next_logprobs(
    reference: ReferenceModel, ids: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Returns the log-probabilities of the next token at each position, with the shape [positions
    V].
    """
    return _logprobs_of(reference.model, reference.device, ids, positions)


def _logprobs_of(
    model: Any, device: torch.device, ids: Sequence[int], positions: Sequence[int]
) -> Tensor:
    input_ids = torch.tensor([list(ids)], device=device)
    logits = model(input_ids).logits[0]
    previous_positions = torch.tensor(
        [position - 1 for position in positions], device=logits.device
    )
    logprobs: Tensor = logits[previous_positions].double().log_softmax(-1)
    return logprobs.cpu()


@torch.no_grad()
def _generate(
    reference: ReferenceModel, ids: Sequence[int], config: GenerationConfig
) -> tuple[int, ...]:
    input_ids = torch.tensor([list(ids)], device=reference.device)
    mask = torch.ones_like(input_ids)
    output = reference.model.generate(input_ids, attention_mask=mask, generation_config=config)
    return tuple(output[0, len(ids) :].tolist())


def _strip_end_tokens(ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    return [index for index in ids if index not in end_ids]


def _build_prompt(tokenizer: Any, template: ChatTemplate | None, prompt: SamplePrompt) -> Prompt:
    if template is None or not prompt.messages:
        # a server adds the first token to a text, as the tokenizer did in training
        first_ids = tokenizer("")["input_ids"][:1]
        is_added = first_ids == [tokenizer.bos_token_id] == list(prompt.input_ids[:1])
        text_ids = prompt.input_ids[1:] if is_added else prompt.input_ids
        text = tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
        return Prompt(text, prompt.input_ids)
    return _render_prompt(tokenizer, template, prompt.messages, tools=prompt.tools)


def _render_prompt(
    tokenizer: Any,
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Any = None,
    switches: Mapping[str, Any] | None = None,
) -> Prompt:
    text = template.render(
        messages, tools=tools, generation_prompt=True, location="the prompt", switches=switches
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(text, tuple(ids), tuple(messages), tools, switches or {})


def _probe_system(tokenizer: Any, template: ChatTemplate | None) -> list[Prompt]:
    """Returns a conversation with a system message; none if the template ignores system messages."""
    if template is None:
        return []
    messages = [
        {"role": "system", "content": _SYSTEM_TEXT},
        {"role": "user", "content": _QUESTION},
    ]
    try:
        prompt = _render_prompt(tokenizer, template, messages)
    except UsageError:
        return []
    return [prompt] if _SYSTEM_TEXT in prompt.text else []


def _probe_tools(tokenizer: Any, template: ChatTemplate | None) -> list[Prompt]:
    """Returns a conversation with a tool; none if the template ignores tools."""
    if template is None or not template.reads_key("tools"):
        return []
    messages = [{"role": "user", "content": _QUESTION}]
    try:
        prompt = _render_prompt(tokenizer, template, messages, tools=_TOOLS)
    except UsageError:
        return []
    return [prompt] if "get_weather" in prompt.text else []


def _probe_thinking(tokenizer: Any, template: ChatTemplate | None) -> list[Prompt]:
    """Returns conversations with each value of the template's switch for thinking; none if the
    template has no such switch.
    """
    if template is None:
        return []
    messages = [{"role": "user", "content": _QUESTION}]
    for switch in _THINKING_SWITCHES:
        if not template.reads_key(switch):
            continue
        prompts = [
            _render_prompt(tokenizer, template, messages, switches={switch: value})
            for value in (True, False)
        ]
        if prompts[0].text != prompts[1].text:
            return prompts
    return []


def _find_endings(
    reference: ReferenceModel, rows: Sequence[Row], end_ids: frozenset[int]
) -> list[tuple[int, ...]]:
    """Finds rows in which the trained model predicts an end token at the correct position. Returns
    the tokens of these rows that come before the end token.
    """
    endings: list[tuple[int, ...]] = []
    for row in rows:
        learnt = [
            position
            for position, label in enumerate(row.labels)
            if position > 0 and label != IGNORE_INDEX and label in end_ids
        ]
        if not learnt or len(endings) == STOP_PROBES:
            continue
        position = learnt[-1]
        (logprobs,) = _next_logprobs(reference, row.input_ids, [position])
        if int(logprobs.argmax()) == row.input_ids[position]:
            endings.append(row.input_ids[:position])
    return endings


def _score_single_tokens(reference: ReferenceModel, prompts: Sequence[Prompt]) -> list[SingleToken]:
    tokens = list(dict.fromkeys(prompt.ids[-1 - i] for i in range(2) for prompt in prompts))
    single = []
    for token in tokens[:_SINGLE_TOKENS]:
        (logprobs,) = _next_logprobs(reference, (token, token), [1])
        single.append(SingleToken(token, _most_probable(logprobs, ALTERNATIVES)))
    return single
