"""The interface of each server, as its documentation writes requests and answers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api import Connection, Prompt, connect, parse_address
from tests.inference.served.test_http import Recorder, serving

from isotype.errors import UsageError

CHAT = Prompt("<s>ask", (1, 5, 6), messages=({"role": "user", "content": "ask"},))
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def models(owner: str, name: str = "m", **facts: Any) -> dict[str, Any]:
    entry = {"id": name, "object": "model", "created": 1, "owned_by": owner}
    return {"object": "list", "data": [entry | facts]}


def refuse(fields: set[str], answer: Any) -> Any:
    """Answers a request, and refuses it if it has one of these fields."""

    def respond(handler: Any, body: Any) -> None:
        import json

        is_refused = bool(fields & set(body))
        content = json.dumps({"error": {"message": "logprobs"}} if is_refused else answer).encode()
        handler.send_response(400 if is_refused else 200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return respond


def open_server(url: str) -> Any:
    return connect(Connection(parse_address(url), seconds=5.0), None)


def test_ollama() -> None:
    logprobs = [
        {"token": "it", "logprob": -0.2, "bytes": [105, 116], "top_logprobs": []},
        {"token": " is", "logprob": -0.3, "bytes": [32, 105, 115], "top_logprobs": []},
    ]
    recorder = Recorder(
        {
            "/v1/models": models("library", "m:latest"),
            "/api/show": {
                "details": {"family": "llama", "quantization_level": "Q4_0"},
                "parameters": 'stop   "<|im_end|>"\nnum_ctx                        2048',
                "template": "{{ .Prompt }}",
            },
            "/api/chat": {
                "model": "m:latest",
                "created_at": "2026-11-28T00:00:00Z",
                "message": {"role": "assistant", "content": "it is"},
                "logprobs": logprobs,
                "done": True,
                "done_reason": "stop",
                "prompt_eval_count": 3,
                "eval_count": 3,
            },
        }
    )
    with serving(recorder) as url:
        server = open_server(url)
        answer = server.chat(CHAT, 8)
    assert (server.facts.engine, server.facts.context, server.facts.weights) == (
        "Ollama",
        2048,
        "Q4_0",
    )
    assert answer.text == "it is"
    assert answer.texts == ("it", " is")
    assert answer.logprobs == (-0.2, -0.3)
    assert answer.has_ended
    assert answer.prompt_tokens == 3
    body = recorder.requests[-1][2]
    assert body["options"] == {"temperature": 0, "num_predict": 8, "seed": 0, "repeat_penalty": 1.0}
    assert server.complete((1, 5), 1) is None


def test_the_context_that_ollama_chose_is_read_after_the_model_is_loaded() -> None:
    """A Modelfile need not have num_ctx. Ollama cuts prompts that are longer than its own choice."""
    loaded: list[str] = []

    def load(handler: Any, body: Any) -> dict[str, Any]:
        loaded.append(body["model"])
        assert "prompt" not in body
        return {"model": body["model"], "response": "", "done": True, "done_reason": "load"}

    def list_loaded(handler: Any, body: Any) -> dict[str, Any]:
        entries = [{"name": name, "model": name, "context_length": 4096} for name in loaded]
        return {"models": [{"name": "other:latest", "context_length": 64}, *entries]}

    answers = {"/v1/models": models("library", "m:latest"), "/api/show": {"parameters": "stop x"}}
    with serving(Recorder(answers | {"/api/generate": load, "/api/ps": list_loaded})) as url:
        assert open_server(url).facts.context == 4096
    with serving(Recorder(answers)) as url:
        assert open_server(url).facts.context is None, "an Ollama without /api/ps"
    with (
        serving(Recorder(answers | {"/api/ps": {"models": [3]}})) as url,
        pytest.raises(UsageError, match="/api/ps: an answer of another form than documented"),
    ):
        open_server(url)


def test_lm_studio_without_log_probabilities() -> None:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "it is"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
    facts = {"id": "m", "quantization": "Q8_0", "state": "loaded", "max_context_length": 4096}
    recorder = Recorder(
        {
            "/v1/models": models("organization_owner"),
            "/api/v0/models": {"object": "list", "data": [facts]},
            "/v1/chat/completions": refuse({"logprobs"}, answer),
        }
    )
    with serving(recorder) as url:
        server = open_server(url)
        result = server.chat(CHAT, 8)
        again = server.chat(CHAT, 8)
    assert (server.facts.engine, server.facts.context, server.facts.weights) == (
        "LM Studio",
        4096,
        "Q8_0",
    )
    assert result == again
    assert result.logprobs is None
    assert result.has_ended
    asked = [path for path, _, _ in recorder.requests].count("/v1/chat/completions")
    assert asked == 3, "the field that was refused is not sent again"


def test_vllm() -> None:
    choice = {
        "index": 0,
        "text": "it is",
        "token_ids": None,
        "logprobs": {
            "tokens": ["token_id:7", "token_id:2"],
            "token_logprobs": [-0.2, -0.3],
            "top_logprobs": [{"token_id:7": -0.2, "token_id:9": -2.0}, {"token_id:2": -0.3}],
            "text_offset": [0, 2],
        },
        "finish_reason": "stop",
        "prompt_logprobs": [
            None,
            {"5": {"logprob": -1.5, "rank": 3, "decoded_token": "a"}},
            {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        ],
    }
    recorder = Recorder(
        {
            "/v1/models": models("vllm", max_model_len=128),
            "/tokenize": {"count": 3, "max_model_len": 128, "tokens": [1, 5, 6]},
            "/detokenize": {"prompt": "<s>ask"},
            "/v1/completions": {"id": "cmpl-1", "choices": [choice], "usage": USAGE},
        }
    )
    with serving(recorder) as url:
        server = open_server(url)
        assert server.render(CHAT) == "<s>ask"
        assert server.tokenize(CHAT) == (1, 5, 6)
        assert server.tokenize_text("ask") == (1, 5, 6)
        answer = server.complete((1, 5, 6), 4)
        assert server.score((1, 5, 6), (1, 2)) == [-1.5, -0.5]
    assert answer.ids == (7, 2)
    assert answer.alternatives == ({7: -0.2, 9: -2.0}, {2: -0.3})
    assert answer.has_ended
    assert server.facts.context == 128
    tokenized = [body for path, _, body in recorder.requests if path == "/tokenize"]
    assert tokenized[0]["add_generation_prompt"]
    assert tokenized[-1]["add_special_tokens"] is False


def test_sglang() -> None:
    generated = {
        "text": "it is",
        "output_ids": [7, 2],
        "meta_info": {
            "prompt_tokens": 3,
            "finish_reason": {"type": "stop", "matched": 2},
            "input_token_logprobs": [[None, 1, None], [-1.5, 5, None], [-0.5, 6, None]],
            "output_token_logprobs": [[-0.2, 7, None], [-0.3, 2, None]],
            "output_top_logprobs": [[[-0.2, 7, None], [-2.0, 9, None]], [[-0.3, 2, None]]],
        },
    }
    recorder = Recorder({"/v1/models": models("sglang"), "/generate": generated})
    with serving(recorder) as url:
        server = open_server(url)
        answer = server.complete((1, 5, 6), 4)
        assert server.score((1, 5, 6), (1, 2)) == [-1.5, -0.5]
    assert answer.ids == (7, 2)
    assert answer.alternatives == ({7: -0.2, 9: -2.0}, {2: -0.3})
    assert answer.has_ended


@pytest.mark.parametrize("answer", [{}, {"choices": []}, [1], {"choices": [{"message": 3}]}])
def test_an_answer_of_another_form_is_one_line(answer: Any) -> None:
    recorder = Recorder({"/v1/models": models("me"), "/v1/chat/completions": answer})
    with serving(recorder) as url:
        server = open_server(url)
        with pytest.raises(ValueError, match="an answer of another form than documented"):
            server.chat(CHAT, 8)
