"""The settings of [tokenizer], [data] and [validation]."""

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.sections.section import Count, Lenient, Section, Text


class TokenizerConfig(Section):
    """The tokenizer: an existing one, or one to train on [data]."""

    path: Text | None = Field(
        None,
        description="Hugging Face folder, tokenizer.json, sentencepiece .model or folder of vocab.json",
    )
    vocab_size: Count | Literal["auto"] = Field(
        "auto",
        description='train a tokenizer with exactly this many ids; "auto": as many as fit the text',
    )
    kind: Literal["bpe", "unigram", "sentencepiece_bpe"] = Field(
        "bpe", description="kind of tokenizer to train: byte-level BPE, or sentencepiece's unigram or BPE"
    )
    end_of_document: Text | None = Field(
        None,
        description="token after each document; default: the tokenizer's eos_token or <|endoftext|>",
    )
    add_tokens: Annotated[tuple[Text, ...], Lenient] = Field(
        (), description="special tokens to add to tokenizer.path; new embedding rows start as the mean"
    )
    chat_template: Text | None = Field(
        None,
        description="chatml, alpaca, plain, a Jinja file, or a name; default: the tokenizer's",
    )


class BlendPart(Section):
    """One of several data sets that a run's samples are drawn from."""

    source: Text | Annotated[tuple[Text, ...], Lenient] = Field(
        description="text, in the same forms as data.source"
    )
    weight: float = Field(description="sampling weight relative to the other data sets")
    text_column: Text | None = Field(None, description="text field; default: data.text_column")
    pattern: Text | None = Field(None, description="file pattern; default: data.pattern")


class CurriculumPart(Section):
    """Weights of the data sets of [[data.blend]] from a step on."""

    step: Count = Field(description="first step with these weights; the steps of a run count from 1")
    weights: Annotated[tuple[float, ...], Lenient] = Field(
        description="sampling weight of each [[data.blend]] table, in their order; 0 pauses one"
    )


class DataConfig(Section):
    """The training text and how it is read."""

    kind: Literal["text", "instruct", "preference"] = Field(
        "text",
        description='"text": documents; "instruct": conversations; "preference": pairs of answers to a prompt',
    )
    source: Text | Annotated[tuple[Text, ...], Lenient] | None = Field(
        None,
        description='text file, folder, .jsonl, .parquet, .gz, X of X.bin, hf:org/name, "stdlib", or a list',
    )
    blend: Annotated[tuple[BlendPart, ...], Lenient] | None = Field(
        None, description="[[data.blend]] tables with source and weight, instead of source"
    )
    curriculum: Annotated[tuple[CurriculumPart, ...], Lenient] = Field(
        (), description="[[data.curriculum]] tables with step and weights: the blend from this step on"
    )
    validation: Text | Annotated[tuple[Text, ...], Lenient] | None = Field(
        None, description="validation text, in the same forms as source; set this or split"
    )
    split: Annotated[tuple[float, ...], Lenient] | None = Field(
        None,
        description="fractions for training, validation and test, as in [0.98, 0.01, 0.01]",
    )
    text_column: Text = Field("text", description="field of a .jsonl line or column of a table with the text")
    pattern: Text = Field("*", description='glob of the files to read in a folder, such as "*.txt"')
    min_length: int = Field(0, ge=0, lt=2**31, description="skip documents with fewer tokens than this")
    document_mask: bool = Field(
        False,
        description="limit attention to the token's own document; positions restart with each",
    )
    train_on: Literal["answers", "all", "last"] = Field(
        "answers", description="instruct: tokens in the loss: all answers, all text, or the last answer"
    )
    packing: Literal["best_fit", "first_fit", "greedy", "none", "concatenate"] = Field(
        "best_fit", description="instruct: how conversations share a sequence; only concatenate cuts them"
    )
    length_buckets: int = Field(
        0,
        ge=0,
        le=8,
        description='packing = "none": batches of similar lengths, in at most this many shapes; 0: off',
    )
    too_long: Literal["truncate", "drop", "stop"] = Field(
        "truncate",
        description="instruct, preference: what happens to one longer than training.sequence_length",
    )
    streaming: bool = Field(
        False,
        description="read .jsonl or .parquet while training, without token files; needs training.steps",
    )
    order: Literal["megalite", "megatron"] = Field(
        "megalite",
        description='"megatron": the samples of .bin/.idx files in the order of Megatron-core\'s GPTDataset',
    )
    shuffle: bool = Field(
        True, description="shuffle the sequences anew in each epoch; streaming: nearby documents"
    )
    workers: int = Field(2, ge=0, lt=1024, description="number of processes that tokenize text")
    loader_workers: int = Field(
        1,
        ge=0,
        lt=1024,
        description="number of threads that read batches ahead; 0: each step reads its own batch",
    )
    prefetch: Count = Field(2, description="number of steps whose batches are read ahead")

    @property
    def masks_documents(self) -> bool:
        """Whether tokens see their own document only."""
        return self.document_mask or self.kind != "text"

    @property
    def rows_together(self) -> int:
        """The number of consecutive samples that stay in one micro batch: the two answers of a pair."""
        return 2 if self.kind == "preference" else 1


class ValidationConfig(Section):
    """Validation: the loss on data.validation or data.split, always after the last step."""

    every: Count | Text | None = Field(
        None,
        description='steps between validations, or epochs as in "1 epoch"; default: only after the last step',
    )
    at_start: bool = Field(False, description="also validate before the first step")
    samples: Count | None = Field(
        None, description="sequences per data set, the same ones in each validation; default: all"
    )
    patience: Count | None = Field(
        None, description="number of validations without improvement that end the run (early stopping)"
    )
    minimum_improvement: float = Field(
        0.0, ge=0, description="smallest decrease of the loss that counts as improvement, with patience"
    )
