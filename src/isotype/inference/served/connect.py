"""Finds out which server program runs at an address, and which of its models to use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .engines import LlamaCppServer, OllamaServer, SglangServer, VllmServer
from .http import Connection, UnknownCallError
from .openai import OpenAiServer
from .server import ServerFacts

# `owned_by` of a model in /v1/models -> the program
_ENGINES = {
    "llamacpp": "llama.cpp",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "library": "Ollama",
    "organization_owner": "LM Studio",
}
_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)", re.MULTILINE)


def connect(connection: Connection, model: str | None) -> OpenAiServer:
    """Returns the server at an address.

    model   the name of the model to use; None means the server's only model
    Raises  UsageError for a server without the OpenAI interface, and for a model that the server
            does not have
    """
    try:
        models = connection.get("/v1/models")
    except UnknownCallError as error:
        raise UsageError(f"{error.message}: no OpenAI interface there") from None
    try:
        entries = {str(entry["id"]): entry for entry in models["data"]}
    except (KeyError, TypeError):
        raise connection.error("/v1/models: no list of models") from None
    name = _choose_model(connection, entries, model)
    engine = _ENGINES.get(str(entries[name].get("owned_by")), "OpenAI interface")
    if engine == "llama.cpp":
        return LlamaCppServer(connection, _llama_cpp_facts(connection, name))
    if engine == "vLLM":
        context = entries[name].get("max_model_len")
        return VllmServer(connection, ServerFacts(engine, name, context))
    if engine == "SGLang":
        context = entries[name].get("max_model_len")
        return SglangServer(connection, ServerFacts(engine, name, context))
    if engine == "Ollama":
        return OllamaServer(connection, _ollama_facts(connection, name))
    return OpenAiServer(connection, _openai_facts(connection, engine, name))


def _choose_model(connection: Connection, entries: Mapping[str, Any], requested: str | None) -> str:
    names = list(entries)
    if not names:
        raise connection.error("the server has no model loaded")
    if requested is None and len(names) == 1:
        return names[0]
    name_list = ", ".join(names[:8])
    if requested is None:
        raise connection.error(f"the server has several models: {name_list}", "--model NAME")
    # Ollama names a model with its tag
    for candidate in (requested, f"{requested}:latest"):
        if candidate in entries:
            return candidate
    near = difflib.get_close_matches(requested, names, n=1)
    advice = f"--model {near[0]}" if near else f"--model with one of {name_list}"
    raise connection.error(f"no model {requested} there", advice)


def _llama_cpp_facts(connection: Connection, name: str) -> ServerFacts:
    answer = _mapping(connection.try_get("/props"))
    settings = _mapping(answer.get("default_generation_settings"))
    adapters = connection.try_get("/lora-adapters")
    return ServerFacts(
        "llama.cpp",
        name,
        context=_whole_number(settings.get("n_ctx")),
        weights=str(answer.get("model_ftype") or ""),
        model_file=str(answer.get("model_path") or ""),
        adapter_scales=_adapter_scales(adapters),
    )


def _adapter_scales(adapters: Any) -> dict[str, float] | None:
    if not isinstance(adapters, Sequence):
        return None
    try:
        return {str(entry["path"]): float(entry["scale"]) for entry in adapters}
    except (KeyError, TypeError, ValueError):
        return None


def _ollama_facts(connection: Connection, name: str) -> ServerFacts:
    answer = _mapping(connection.try_post("/api/show", {"model": name}))
    details = _mapping(answer.get("details"))
    match = _NUM_CTX.search(str(answer.get("parameters") or ""))
    return ServerFacts(
        "Ollama",
        name,
        context=int(match[1]) if match else _read_loaded_context(connection, name),
        weights=str(details.get("quantization_level") or ""),
    )


def _read_loaded_context(connection: Connection, name: str) -> int | None:
    """Returns the context of a model whose Modelfile does not set it. Ollama then chooses it when
    it loads the model, and lists it for loaded models only. A request without a prompt loads the
    model.

    Source  docs.ollama.com/api/ps
    """
    connection.try_post("/api/generate", {"model": name, "stream": False})
    answer = connection.try_get("/api/ps")
    with connection.reading("/api/ps"):
        entries = [] if answer is None else answer["models"]
        loaded: Mapping[str, Any] = next((entry for entry in entries if entry["name"] == name), {})
        return _whole_number(loaded.get("context_length"))


def _openai_facts(connection: Connection, engine: str, name: str) -> ServerFacts:
    models = _mapping(connection.try_get("/api/v0/models") if engine == "LM Studio" else None)
    entries = models.get("data") or []
    answer: Mapping[str, Any] = next((entry for entry in entries if entry.get("id") == name), {})
    context = answer.get("loaded_context_length") or answer.get("max_context_length")
    return ServerFacts(
        engine, name, context=_whole_number(context), weights=str(answer.get("quantization") or "")
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
