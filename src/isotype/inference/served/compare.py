"""Compares the answers of a server with the answers that the run expects. The comparison uses no
other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from ...errors import UsageError
from ...wording import pluralise
from ..verify.result import kept_share
from .expectation import Expectations, ExpectedAnswer
from .result import ABSENT, DIFFERS, NO_GAIN, SAME, UNKNOWN, Check, ServedResult
from .server import Answer, Prompt, RefusedError, Server

# Root mean square of the differences between log-probabilities. Tiny models gave 0.001 to 0.01 for
# the 16-bit types, 0.01 to 0.03 for Q8_0, and 0.1 to 0.5 for Q4_0. SmolLM2-135M gave 0.004 for F16,
# 0.12 for Q8_0, and 0.23 for F16 if the adapter was first merged to bf16.
LIMIT = 0.05
# A server that computes in the run's own dtypes rounds at other places than the run. SmolLM2-135M
# in bf16: 0.065 for the run itself, 0.071 for vLLM with the adapter.
_RUN_ERRORS = 1.5
# of the differences between trained model and base; below it no adapter can be told from no adapter
_SMALLEST_EFFECT = 0.02
# if one token alone has less than this share of the error, positions are the cause
_POSITION_SHARE = 0.1
_EXTRA_TOKENS = 8  # asked beyond the end of the expected answer
_TEXT_SHOWN = 40  # characters of a text that are printed

LogProbs = tuple[float, float, float]  # of one token: the server's, the trained model's, the base's


@dataclass
class Comparison:
    """The answers of a server, together with the expected answers.

    pairs       (server, trained, base) log-probabilities of the same tokens
    agreements  for each answer, the number of equal tokens and the number of compared tokens
    differing   descriptions of answers that differ although one token was clearly more probable
    early       descriptions of answers that end before the answer of the trained model
    late        descriptions of answers that continue after the end token
    endings     the number of answers and rows whose end was compared
    """

    pairs: list[LogProbs] = field(default_factory=list)
    agreements: list[tuple[int, int]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    endings: int = 0

    @property
    def agreement(self) -> float | None:
        total = sum(count for _, count in self.agreements)
        return sum(equal for equal, _ in self.agreements) / total if total else None

    def distance(self, first: int, second: int) -> float:
        """Returns the root mean square of the difference of two columns of `pairs`."""
        mean: float = fmean((pair[first] - pair[second]) ** 2 for pair in self.pairs)
        return math.sqrt(mean)


def compare_server(
    expectations: Expectations, server: Server, *, url: str, min_kept: float
) -> ServedResult:
    """Sends requests to a server, and compares each property separately.

    Raises  UsageError for a server that cannot answer
    """
    facts = server.facts
    if facts.context is not None and facts.context < expectations.longest:
        raise UsageError(
            f"{url}: its context of {facts.context} tokens is too short: a prompt of the run needs"
            f" {expectations.longest}",
            fix=server.remedies.context,
        )
    notes = []
    if facts.context is not None and facts.context < expectations.max_length:
        notes.append(
            f"the server's context is {facts.context} tokens, the run's rows have up to"
            f" {expectations.max_length}: {server.remedies.context}"
        )
    chats = [
        server.chat(answer.prompt, len(answer.ids) + _EXTRA_TOKENS)
        for answer in expectations.answers
    ]
    if cut_prompt := _find_cut_prompt(expectations, chats):
        message = f"{url}: the server reads only a part of long prompts: {cut_prompt}"
        raise UsageError(message, fix=server.remedies.context)
    prompt_checks = _compare_prompts(expectations, server, chats)
    has_template = prompt_checks[0].outcome != DIFFERS
    comparison = _compare_answers(expectations, server, chats, has_template=has_template)
    scored = _score_rows(expectations, server)
    comparison.pairs += [triple for row in scored for triple in row]
    losses = _mean_losses(expectations, scored)
    weights = _compare_weights(expectations, comparison, losses, min_kept)
    has_weights = not any(check.outcome == DIFFERS for check in weights)
    cause = None
    if not has_weights:
        keeps_enough = losses.kept is not None and losses.kept >= min_kept
        cause = _find_cause(expectations, server, comparison, keeps_enough=keeps_enough)
    checks = [
        *prompt_checks,
        *_compare_probes(expectations, server, has_template=has_template),
        *weights,
        _check_stop(server, comparison, has_weights=has_weights),
    ]
    if not comparison.pairs:
        notes.append("the server returns no log-probabilities: only texts and tokens are compared")
    return ServedResult(
        url=url,
        engine=facts.engine,
        model=facts.model,
        checks=[_name_folder(check, expectations.folder) for check in checks],
        cause=None if cause is None else _name_folder(cause, expectations.folder),
        kept=losses.kept,
        min_kept=min_kept,
        base_loss=losses.base,
        trained_loss=losses.trained,
        served_loss=losses.served,
        agreement=comparison.agreement,
        rows=len(expectations.rows),
        tokens=sum(len(row.positions) for row in expectations.rows),
        prompts=len(expectations.answers),
        row_source=expectations.row_source,
        notes=notes,
    )


def _find_cut_prompt(expectations: Expectations, chats: Sequence[Answer]) -> str:
    """Returns a text with the lengths of a prompt that the server has cut, or "" if it has cut
    none. If the context of Ollama is too short, for example, it drops a part of each longer prompt.
    Then prompts of different lengths have the same, smaller number of tokens.
    """
    cut_prompts = [
        (len(answer.prompt.ids), chat.prompt_tokens)
        for answer, chat in zip(expectations.answers, chats)
        if chat.prompt_tokens is not None and chat.prompt_tokens < len(answer.prompt.ids) - 1
    ]
    lengths = {length for length, _ in cut_prompts}
    counts = {count for _, count in cut_prompts}
    if len(lengths) < 2 or len(counts) > 1:
        return ""
    return f"{counts.pop()} of {max(lengths)} tokens"


def _name_folder(check: Check, folder: str) -> Check:
    return replace(check, fix=check.fix.replace("RUN", folder))


def _compare_prompts(
    expectations: Expectations, server: Server, chats: Sequence[Answer]
) -> list[Check]:
    """Compares the rendered text, the tokens, and the first token of the prompts."""
    prompts = [answer.prompt for answer in expectations.answers]
    fix = server.remedies.template
    texts = [server.render(prompt) if prompt.messages else prompt.text for prompt in prompts]
    tokens = [server.tokenize(prompt) for prompt in prompts]
    counts = [answer.prompt_tokens for answer in chats]
    checks = [_check_texts("prompt", expectations, prompts, texts, counts, fix)]
    if any(ids is None for ids in tokens):
        return [*checks, *_check_counts(expectations, server, prompts, counts)]
    checks.append(_check_tokens(expectations, server, prompts))
    firsts = set()
    for prompt, ids, count in zip(prompts, tokens, counts):
        assert ids is not None
        expected = _count_first(prompt.ids, expectations.first_id)
        first_count = _count_first(ids, expectations.first_id)
        # a chat may be tokenised in another way than its rendered text
        surplus = 0 if count is None else count - len(ids)
        firsts.add((first_count + surplus if abs(surplus) == 1 else first_count, expected))
    checks.append(_check_first_token(expectations, server, firsts))
    return checks


def _check_tokens(expectations: Expectations, server: Server, prompts: Sequence[Prompt]) -> Check:
    """Compares the tokens of the run's own rendered prompts."""
    for prompt in prompts:
        ids = server.tokenize_text(prompt.text)
        if ids is None:
            return Check("tokens", UNKNOWN, "the server returns no tokens of a text")
        served_ids = _strip_first_tokens(ids, expectations.first_id)
        expected = _strip_first_tokens(prompt.ids, expectations.first_id)
        if served_ids != expected:
            fix = "the tokenizer of the run, which isotype export writes"
            return Check("tokens", DIFFERS, _token_difference(served_ids, expected), fix)
    return Check("tokens", SAME)


def _check_texts(
    name: str,
    expectations: Expectations,
    prompts: Sequence[Prompt],
    texts: Sequence[str | None],
    counts: Sequence[int | None],
    fix: str,
) -> Check:
    """Compares the rendered prompts. If the server cannot render prompts, this function compares
    the numbers of tokens of the prompts.
    """
    first_text = expectations.first_text
    for prompt, text, count in zip(prompts, texts, counts):
        if text is None:
            if count is None:
                return Check(name, UNKNOWN, "the server returns neither prompts nor their lengths")
            if abs(count - len(prompt.ids)) > 1:
                message = f"{count} tokens, the run's prompt has {len(prompt.ids)}"
                return Check(name, DIFFERS, message, fix)
        else:
            served_text = _strip_first_text(text, first_text)
            expected = _strip_first_text(prompt.text, first_text)
            if served_text != expected:
                return Check(name, DIFFERS, _text_difference(served_text, expected), fix)
    if any(text is None for text in texts):
        return Check(name, SAME, "by the number of tokens; the server returns no prompts")
    return Check(name, SAME)


def _check_counts(
    expectations: Expectations,
    server: Server,
    prompts: Sequence[Prompt],
    counts: Sequence[int | None],
) -> list[Check]:
    """Compares the numbers of tokens to find out whether the first token occurs twice or is
    missing.
    """
    tokens = Check("tokens", UNKNOWN, "the server returns no tokens of prompts")
    if any(count is None for count in counts):
        return [tokens, Check("first", UNKNOWN, "the server returns no lengths of prompts")]
    surplus = {count - len(prompt.ids) for prompt, count in zip(prompts, counts) if count}
    if surplus == {1}:
        message = "each prompt has one token more than in training: the first token comes twice"
        return [tokens, Check("first", DIFFERS, message, server.remedies.first_token)]
    if surplus == {-1}:
        message = "each prompt has one token less than in training: the first token is missing"
        return [tokens, Check("first", DIFFERS, message, server.remedies.first_token)]
    return [tokens, Check("first", SAME, "by the number of tokens")]


def _check_first_token(
    expectations: Expectations, server: Server, firsts: set[tuple[int, int]]
) -> Check:
    first_text = expectations.first_text
    times = {0: "never", 1: "once", 2: "twice"}
    for served_count, expected in sorted(firsts):
        if served_count == expected:
            continue
        message = (
            f"{first_text} comes {times.get(served_count, f'{served_count} times')} at the beginning, in training"
            f" {times.get(expected, f'{expected} times')}"
        )
        return Check("first", DIFFERS, message, server.remedies.first_token)
    if any(expected for _, expected in firsts):
        return Check("first", SAME, f"{first_text} comes once")
    return Check("first", SAME, "no token is added at the beginning")


def _count_first(ids: Sequence[int], first_id: int | None) -> int:
    """Returns how many times the start token occurs at the beginning."""
    count = 0
    while first_id is not None and count < len(ids) and ids[count] == first_id:
        count += 1
    return count


def _strip_first_tokens(ids: Sequence[int], first_id: int | None) -> tuple[int, ...]:
    return tuple(ids[_count_first(ids, first_id) :])


def _strip_first_text(text: str, first_text: str) -> str:
    while first_text and text.startswith(first_text):
        text = text.removeprefix(first_text)
    return text


def _compare_probes(
    expectations: Expectations, server: Server, *, has_template: bool
) -> list[Check]:
    """Compares how the server renders conversations with a system message, with tools, and with
    each value of the switch for thinking.

    has_template  whether the server has the run's template, as found with the prompts of the run
    """
    remedies = server.remedies
    checks = []
    probes = [
        ("system", expectations.system, remedies.template, "system messages"),
        ("tools", expectations.tools, remedies.template, "tools"),
        ("thinking", expectations.thinking, remedies.thinking, "switch for thoughts"),
    ]
    for name, prompts, fix, subject in probes:
        if not prompts:
            checks.append(Check(name, ABSENT, f"the run's template has no {subject}"))
            continue
        counts: list[int | None] = [None for _ in prompts]
        try:
            texts = [server.render(prompt) for prompt in prompts]
            if all(text is None for text in texts) and name != "thinking":
                counts = [server.chat(prompt, 1).prompt_tokens for prompt in prompts]
        except RefusedError as error:
            checks.append(Check(name, DIFFERS, error.message, remedies.template))
            continue
        fix = fix if has_template else remedies.template
        check = _check_texts(name, expectations, prompts, texts, counts, fix)
        # llama.cpp's own ChatML renders ordinary conversations as many templates do
        has_template &= check.outcome != DIFFERS
        checks.append(check)
    return checks


def _compare_answers(
    expectations: Expectations, server: Server, chats: Sequence[Answer], *, has_template: bool
) -> Comparison:
    comparison = Comparison()
    for expected, chat in zip(expectations.answers, chats):
        completion = server.complete(expected.prompt.ids, len(expected.ids))
        _compare_tokens(comparison, expectations, expected, completion or chat)
        if has_template:
            _compare_end(comparison, expected, chat)
    for ids in expectations.endings:
        answer = server.complete(ids, 1)
        if answer is None:
            break
        comparison.endings += 1
        if not answer.has_ended:
            comparison.late.append(f"after a whole answer it goes on with {_quote(answer.text)}")
    return comparison


def _compare_tokens(
    comparison: Comparison,
    expectations: Expectations,
    expected: ExpectedAnswer,
    answer: Answer,
) -> None:
    """Compares a greedy answer token by token, up to the first difference."""
    is_same = _token_equality(expected, answer)
    limit = len(expected.ids)
    found_count = len(answer.ids if answer.ids is not None else answer.texts)
    equal = 0
    while equal < min(limit, found_count) and is_same(equal):
        comparison.pairs += _logprob_pairs(expected, answer, equal)
        equal += 1
    if not found_count:
        _compare_texts(comparison, expected, answer)
        return
    if equal == limit:
        comparison.agreements.append((equal, limit))
        return
    if equal == found_count or _is_end(expectations, answer, equal):
        is_last = expected.ids[equal] in expectations.end_ids
        if answer.has_ended and not is_last:
            going_on = "".join(expected.texts[equal : equal + 8])
            comparison.early.append(
                f"an answer ends after {pluralise(equal, 'token')}; the trained model goes on with"
                f" {_quote(going_on)}"
            )
        comparison.agreements.append((equal, max(1, equal)))
        return
    comparison.agreements.append((equal, limit))
    found_id = None if answer.ids is None else answer.ids[equal]
    margin = _margin(expected, equal, found_id)
    if margin is None or margin > 2 * _logprob_limit(expectations):
        comparison.differing.append(_answer_difference(expected, answer, equal))


def _logprob_limit(expectations: Expectations) -> float:
    """Returns the largest root mean square of the differences between log-probabilities that counts
    as the same.
    """
    return max(LIMIT, _RUN_ERRORS * expectations.run_error)


def _logprob_pairs(expected: ExpectedAnswer, answer: Answer, index: int) -> list[LogProbs]:
    """Returns the log-probabilities of the most probable tokens at a position, or only of the token
    itself if the server returns no other tokens. For each token there is a tuple with the values of
    the server, the trained model and the base model.
    """
    if answer.logprobs is None:
        return []
    if index >= len(answer.alternatives):
        return [(answer.logprobs[index], expected.logprobs[index], expected.base_logprobs[index])]
    trained = expected.alternatives[index]
    base = expected.base_alternatives[index]
    return [
        (value, trained[token], base[token])
        for token, value in answer.alternatives[index].items()
        if token in trained
    ]


def _token_equality(expected: ExpectedAnswer, answer: Answer) -> Callable[[int], bool]:
    if answer.ids is not None:
        ids = answer.ids
        return lambda index: ids[index] == expected.ids[index]
    return lambda index: answer.texts[index] == expected.texts[index]


def _is_end(expectations: Expectations, answer: Answer, index: int) -> bool:
    """Returns True if the server's token at this position is the last token of its answer."""
    if answer.ids is None or not answer.has_ended:
        return False
    return index == len(answer.ids) - 1 and answer.ids[index] not in expectations.end_ids


def _margin(expected: ExpectedAnswer, index: int, found_id: int | None) -> float | None:
    """Returns how much larger the log-probability of the trained model's own token is than the
    log-probability of the server's token. Both values come from the trained model. Returns None if
    the server's token is not among the most probable tokens.
    """
    alternatives = expected.alternatives[index]
    if found_id is None or found_id not in alternatives:
        return None
    return expected.logprobs[index] - alternatives[found_id]


def _compare_texts(comparison: Comparison, expected: ExpectedAnswer, answer: Answer) -> None:
    """Compares the texts of answers whose tokens are unknown."""
    served_text = answer.text.strip()
    text = expected.text.strip()
    is_same = served_text == text or (not expected.has_ended and served_text.startswith(text))
    comparison.agreements.append((int(is_same), 1))
    if not is_same:
        comparison.differing.append(
            f"{_quote(served_text)}, the trained model answers {_quote(text)}"
        )


def _compare_end(comparison: Comparison, expected: ExpectedAnswer, chat: Answer) -> None:
    """Compares where the server's answer ends with where the expected answer ends. The server's
    answer was requested in the same way as a user requests it.
    """
    if not expected.has_ended:
        return
    text = expected.text.strip()
    served_text = chat.text.strip()
    if not served_text.startswith(text):
        return  # another answer, which has another end
    comparison.endings += 1
    if served_text != text:
        comparison.late.append(f"it goes on with {_quote(served_text.removeprefix(text))}")
    elif not chat.has_ended:
        comparison.late.append("it goes on after the end token")


def _check_stop(server: Server, comparison: Comparison, *, has_weights: bool) -> Check:
    fix = server.remedies.stop
    if comparison.late and not has_weights:
        return Check("stop", UNKNOWN, "the server gives other answers")
    if comparison.late:
        return Check("stop", DIFFERS, comparison.late[0], fix)
    if comparison.early:
        return Check("stop", DIFFERS, comparison.early[0], fix)
    if not comparison.endings:
        return Check("stop", UNKNOWN, "no answer of the trained model ended within the limit")
    return Check(
        "stop", SAME, f"{pluralise(comparison.endings, 'answer')} end where training ended"
    )


def _compare_weights(
    expectations: Expectations, comparison: Comparison, losses: Losses, min_kept: float
) -> list[Check]:
    """Compares greedy tokens and log-probabilities. Also compares losses, to check that the server
    has enough of the improvement that training made.
    """
    return [
        _check_answers(comparison),
        _check_logprobs(expectations, comparison),
        _check_kept(losses, min_kept),
    ]


def _check_logprobs(expectations: Expectations, comparison: Comparison) -> Check:
    if not comparison.pairs:
        return Check("logprobs", UNKNOWN, "the server returns none")
    error = comparison.distance(0, 1)
    outcome = DIFFERS if error > _logprob_limit(expectations) else SAME
    message = f"{error:.4f} from the trained model's (root mean square)"
    run_error = expectations.run_error
    if error > LIMIT and run_error:
        message += f"; the run's own dtypes give {run_error:.4f}"
    return Check("logprobs", outcome, message)


def _check_kept(losses: Losses, min_kept: float) -> Check:
    if losses.served is None:
        return Check("kept", UNKNOWN, "the server scores no given tokens")
    texts = f"loss base {losses.base:.4f}, trained {losses.trained:.4f}, served {losses.served:.4f}"
    kept = losses.kept
    if kept is None:
        return Check("kept", UNKNOWN, f"{texts}; {NO_GAIN}")
    if kept < min_kept:
        message = f"{_percent(kept)} of what the run learnt, less than --keep {min_kept:g}: {texts}"
        return Check("kept", DIFFERS, message)
    return Check("kept", SAME, f"{_percent(kept)} of what the run learnt: {texts}")


def _check_answers(comparison: Comparison) -> Check:
    if comparison.differing:
        number = pluralise(len(comparison.differing), "answer")
        return Check("answers", DIFFERS, f"{number}: {comparison.differing[0]}")
    if comparison.agreement is None:
        return Check("answers", UNKNOWN, "no answer was compared")
    equal = f"{comparison.agreement:.1%} of the greedy tokens"
    if comparison.agreement < 1:
        equal += "; the others are ties, or follow one"
    return Check("answers", SAME, equal)


def _find_cause(
    expectations: Expectations, server: Server, comparison: Comparison, *, keeps_enough: bool
) -> Check:
    """Returns the cause of different answers, and the setting that fixes it.

    keeps_enough  whether the server keeps the share of what was learnt that `--keep` asks for. If
                  it does, rounded weights may also be the cause, even if prompts of a single token
                  show no error
    """
    facts = server.facts
    scales = facts.adapter_scales or {}
    unapplied = [name for name, scale in scales.items() if scale != 1.0]
    if unapplied:
        scale = scales[unapplied[0]]
        message = f"the adapter {unapplied[0]} is applied with scale {scale:g}"
        return _cause(message, "--lora FILE, which applies it with scale 1")
    if comparison.pairs:
        effect = comparison.distance(1, 2)
        is_base = comparison.distance(0, 2) < min(0.5 * effect, comparison.distance(0, 1))
        if effect > _SMALLEST_EFFECT and is_base:
            message = "the server answers as the base does: it has no adapter"
            return _cause(message, server.remedies.adapter)
    single_error = _single_token_error(expectations, server)
    error = comparison.distance(0, 1) if comparison.pairs else 0.0
    if single_error is not None and single_error < _POSITION_SHARE * error:
        if keeps_enough:
            message = (
                "the weights are rounded, or the rotary base, its scaling or the attention window"
                " differs"
            )
            fix = "isotype verify RUN --file FILE compares the file's weights and settings"
            return _cause(message, fix)
        message = (
            "one token alone gives the trained model's values, longer prompts do not: the rotary"
            " base, its scaling, or the attention window differs"
        )
        return _cause(message, "no --rope options, and the file that isotype export writes")
    kind = f" ({facts.weights})" if facts.weights else ""
    fix = "isotype verify RUN --file FILE measures the file"
    if facts.weights == "Q8_0":
        fix += "; F16 or BF16 rounds less"
    elif facts.weights not in ("F16", "BF16"):
        fix += f"; {server.remedies.rounding}"
    return _cause(f"the server's weights{kind} are rounded, or are not the run's", fix)


def _cause(message: str, fix: str) -> Check:
    return Check("cause", DIFFERS, message, fix)


def _single_token_error(expectations: Expectations, server: Server) -> float | None:
    errors = []
    for single in expectations.single_tokens:
        answer = server.complete((single.token,), 1)
        if answer is None or not answer.ids or not answer.logprobs:
            return None
        expected = single.logprobs.get(answer.ids[0])
        if expected is None:
            return float("inf")
        errors.append((answer.logprobs[0] - expected) ** 2)
    return math.sqrt(fmean(errors)) if errors else None


@dataclass(frozen=True)
class Losses:
    """The mean losses of the base model, the trained model and the server on the same tokens.
    `noise` is the standard error of the difference between the losses of the base model and of the
    trained model, estimated from the rows.
    """

    base: float
    trained: float
    served: float | None
    noise: float

    @property
    def kept(self) -> float | None:
        if self.served is None:
            return None
        return kept_share(self.base, self.trained, self.served, self.noise)


def _score_rows(expectations: Expectations, server: Server) -> list[list[LogProbs]]:
    """Returns the log-probabilities of the labelled tokens of each row; empty if the server cannot
    return log-probabilities of given tokens.
    """
    rows = []
    for row in expectations.rows:
        scores = server.score(row.ids, row.positions)
        if scores is None:
            return []
        triples = zip(scores, row.logprobs, row.base_logprobs)
        scored = [(score, *others) for score, *others in triples if score is not None]
        rows.append([(served, trained, base) for served, trained, base in scored])
    return [row for row in rows if row]


def _mean_losses(expectations: Expectations, scored: Sequence[Sequence[LogProbs]]) -> Losses:
    """Returns the mean losses of the tokens for which the server returned log-probabilities, or of
    all labelled tokens.
    """
    is_scored = bool(scored)
    rows = scored or [
        [(0.0, *pair) for pair in zip(row.logprobs, row.base_logprobs)] for row in expectations.rows
    ]
    served, trained, base = (
        -fmean(triple[column] for row in rows for triple in row) for column in range(3)
    )
    gains = [fmean(triple[1] - triple[2] for triple in row) for row in rows]
    noise = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return Losses(base, trained, served if is_scored else None, noise)


def _token_difference(served_ids: Sequence[int], expected: Sequence[int]) -> str:
    position = next(
        (i for i, pair in enumerate(zip(served_ids, expected)) if pair[0] != pair[1]),
        min(len(served_ids), len(expected)),
    )
    return (
        f"at token {position}: {list(served_ids[position : position + 4])}, in training"
        f" {list(expected[position : position + 4])}"
    )


def _text_difference(served_text: str, expected: str) -> str:
    position = next(
        (i for i, pair in enumerate(zip(served_text, expected)) if pair[0] != pair[1]),
        min(len(served_text), len(expected)),
    )
    found_part = _quote(served_text[position:])
    return f"at character {position}: {found_part}, in training {_quote(expected[position:])}"


def _answer_difference(expected: ExpectedAnswer, answer: Answer, index: int) -> str:
    texts = answer.texts[index : index + 8]
    if texts:
        served_text = "".join(texts)
    else:
        # the server returns the ids of tokens, and the text of the whole answer
        served_text = answer.text.removeprefix("".join(expected.texts[:index]))
    trained = "".join(expected.texts[index : index + 8])
    return f"at token {index} {_quote(served_text)}, the trained model {_quote(trained)}"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("-0.0%", "0.0%")


def _quote(text: str) -> str:
    return repr(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}...")
