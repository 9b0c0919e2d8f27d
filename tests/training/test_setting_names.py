"""Checks and errors name settings as their user finds them."""

import dataclasses
import re

import pytest
import transformers
from tests.api import RUN_FILE_NAMES

from isotype.config.schema import RunConfig

KEY = re.compile(r"\b(\w+)\.(\w+)")


def test_names_of_a_run_file_are_keys_of_its_configuration():
    for field, text in dataclasses.asdict(RUN_FILE_NAMES).items():
        keys = KEY.findall(text)
        assert keys, field
        for section, key in keys:
            section_class = RunConfig.model_fields[section].annotation
            assert key in section_class.model_fields, text


def test_names_of_a_trainer_are_its_arguments():
    preflight = pytest.importorskip("isotype.integrations.preflight")
    names = preflight.ARGUMENT_NAMES
    assert not [text for text in dataclasses.asdict(names).values() if KEY.search(text)]
    arguments = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    checkpointing = names.checkpoint_layers.removesuffix("=True")
    used = {names.learning_rate, names.clip, names.batch_size, names.accumulate, checkpointing}
    assert used <= arguments
