"""Contains the data of a diffusion run. The data are pictures and captions, which are encoded once,
and the rows for training and evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...config.sources import picture_sources
from ...errors import UsageError
from .batches import PictureStream, PlacedRow, Row
from .caption_lengths import CutCaptions, count_cut_captions
from .class_pictures import class_picture_facts, draw_class_pictures
from .encode import Encoder, Store, TextInput, entry_key, free_memory
from .pictures import RunPictures, collect_pictures, refuse_other_class_pictures
from .resolved_run import ResolvedRun
from .sample import Prompt, prompt_text_inputs

EMPTY = ""  # the caption of a picture whose caption is dropped


def make_encoder(run: ResolvedRun, device: torch.device) -> Encoder:
    return Encoder(
        run.folder,
        run.precision,
        device,
        Store.open(run.config.images.cache),
        run.max_text_length,
        keeps_tokens=run.config.adapter.text_encoders,
    )


class PictureData:
    """The pictures, captions and prompts of a run, and the rows that are made from them.

    pictures                     exist after `load`
    encoder                      encodes pictures and texts and saves them in its store; exists
                                 after `encode`
    text                         for each encoded text, its key in the store; exists after `encode`
    train_rows, evaluation_rows  exist after `encode`
    """

    pictures: RunPictures
    encoder: Encoder
    text: dict[TextInput, str]
    train_rows: list[Row] | None = None
    evaluation_rows: list[Row]

    def __init__(self, run: ResolvedRun) -> None:
        self.run = run

    def load(self) -> None:
        """Collects the pictures and captions. Raises UsageError."""
        images = self.run.config.images
        self.pictures = collect_pictures(
            images,
            seed=self.run.config.train.seed,
            has_controls=self.run.family.edits_pictures,
            frame_rate=self.run.frame_rate,
            takes_several_controls=self.run.family.takes_several_controls,
        )
        if self.pictures.missing_class_pictures and self.run.config.model.init == "random":
            raise UsageError(
                "images.regularisation: draw: a model of fresh weights draws noise",
                fix="a folder of pictures, or model.init: pretrained",
            )
        refuse_other_class_pictures(
            picture_sources(images, "regularisation"),
            self.pictures.missing_class_pictures,
            class_picture_facts(self.run),
        )

    def encode(self, device: torch.device) -> None:
        """Encodes the pictures and texts of the run, saves the results in its store, and frees the
        encoders. Raises UsageError.
        """
        pictures = self.pictures
        self.encoder = encoder = make_encoder(self.run, device)
        self.text = encoder.encode_captions(self._text_inputs())
        # another process may have drawn the class pictures already
        if missing := [
            picture for picture in pictures.missing_class_pictures if not picture.path.is_file()
        ]:
            draw_class_pictures(self.run, missing, device, self.encoded_prompts)
            free_memory(device)
        rows = encoder.encode_pictures(
            pictures.all_pictures,
            self.text,
            self.run.sizes,
            pictures.bad_pictures,
            seed=self.run.config.train.seed,
        )
        pictures.bad_pictures.refuse_unusable(
            sum(map(bool, rows)),
            fix="replace or remove these files; the others are encoded already",
        )
        encoder.store.enforce_bound()
        split = len(pictures.train)
        self.train_rows = [row for picture_rows in rows[:split] for row in picture_rows]
        self.evaluation_rows = [row for picture_rows in rows[split:] for row in picture_rows]

    def encode_prompts(self, device: torch.device) -> None:
        """Encodes only the texts of the run's prompts."""
        self.encoder = make_encoder(self.run, device)
        self.text = self.encoder.encode_captions(prompt_text_inputs(self.run.prompts, self.encoder))

    def encoded_prompts(
        self, prompts: Sequence[Prompt]
    ) -> list[tuple[Prompt, dict[str, Tensor], dict[str, Tensor]]]:
        """Reads from the store the embeddings of each prompt's text and of its negative text."""
        encoded = []
        for prompt in prompts:
            text, negative = (
                self.encoder.store.get(self.text[text_input])
                for text_input in prompt_text_inputs([prompt], self.encoder)
            )
            encoded.append((prompt, text, negative))
        return encoded

    def _text_inputs(self) -> list[TextInput]:
        """Returns the texts to encode. These are every caption, the empty caption, and the texts of
        the prompts.
        """
        text_input = self.encoder.text_input
        drops_captions = self.run.config.images.caption_dropout > 0
        inputs = [] if self.run.family.encodes_control else [TextInput(EMPTY)]
        for picture in self.pictures.all_pictures:
            inputs += [text_input(caption, picture.controls) for caption in picture.captions]
            inputs += [text_input(EMPTY, picture.controls)] if drops_captions else []
        return list(dict.fromkeys([*inputs, *prompt_text_inputs(self.run.prompts, self.encoder)]))

    @cached_property
    def cut_captions(self) -> CutCaptions:
        captions = (
            caption for picture in self.pictures.all_pictures for caption in picture.captions
        )
        return count_cut_captions(captions, self.run.folder, self.run.max_text_length)

    # rows

    @property
    def row_count(self) -> int:
        """Returns the number of training rows in an epoch. Before the pictures are encoded, this
        may include pictures that cannot be used, because some errors are found only when a picture
        is encoded.
        """
        if self.train_rows is not None:
            return len(self.train_rows)
        return sum(picture.repeats for picture in self.pictures.train)

    @property
    def evaluation_row_count(self) -> int:
        if self.train_rows is None:
            return len(self.pictures.eval)
        return len(self.evaluation_rows)

    @property
    def control_count(self) -> int:
        """Returns the largest number of pictures before the edit of a row."""
        return max((len(picture.controls) for picture in self.pictures.all_pictures), default=0)

    @property
    def encoded_rows(self) -> list[Row]:
        """The training rows. They exist only after the pictures are encoded."""
        assert self.train_rows is not None, "pictures are encoded before the model is built"
        return self.train_rows

    def feed(self) -> PictureStream:
        train = self.run.config.train
        return PictureStream(
            self.encoded_rows,
            seed=train.seed,
            shuffle=self.run.config.images.shuffle,
            step_rows=train.batch_size * train.accumulate,
        )

    def largest_rows(self, count: int) -> list[PlacedRow]:
        largest = max(self.encoded_rows, key=lambda row: row.area).shape
        rows = [row for row in self.encoded_rows if row.shape == largest]
        return [PlacedRow(row, i) for i, row in enumerate((rows * count)[:count])]

    def fingerprints(self) -> dict[str, str]:
        return {
            "training": self._fingerprint(self.encoded_rows),
            "evaluation": self._fingerprint(self.evaluation_rows),
        }

    def _fingerprint(self, rows: Sequence[Row]) -> str:
        contents = [[row.latents, row.mirrored, row.text, row.weight] for row in rows]
        return entry_key([contents, str(self.run.objective)])
