"""A dataset that Energon reads, whose loader can save its state, in the place of mock data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.data.energon.base_energon_datamodule import EnergonMultiModalDataModule
from megatron.energon import Cooker, DefaultTaskEncoder, TextSample, basic_sample_keys, stateless
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

SAMPLES = 40


def prepare(folder: Path, vocab: int, length: int) -> Path:
    """Write a file of samples into a folder, and its index, and return its path."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (SAMPLES, length + 1), generator=generator).tolist()
    file = folder / "samples.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(map(str, each))}) + "\n" for each in tokens))
    CrudeJsonlDatasetFactory.prepare_dataset(file)
    return file


@stateless
def cook(sample: dict) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Encoder(DefaultTaskEncoder):
    """Makes batches as `gpt_step` reads them."""

    cookers = [Cooker(cook)]  # noqa: RUF012 - as Energon has it

    def batch(self, samples):
        whole = torch.tensor([list(map(int, sample.text.split())) for sample in samples])
        tokens, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(tokens.shape), "position_ids": positions}

    def encode_batch(self, batch):
        return batch


@dataclass(kw_only=True)
class EnergonData(DatasetProvider):
    """Settings of a training on such a file."""

    path: str
    seq_length: int
    micro_batch_size: int
    dataloader_type: Literal["external"] | None = "external"
    skip_getting_attention_mask_from_dataset: bool = True

    def build_datasets(self, context):
        module = EnergonMultiModalDataModule(
            self.path, None, self.seq_length, self.micro_batch_size, self.num_workers, pin_memory=False,
            shuffle_buffer_size=8, task_encoder=Encoder(), pg_collection=context.pg_collection,
        )  # fmt: skip
        return module.train_dataloader(), None, None
