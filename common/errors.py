"""The errors that a user sees as a line, and how their line is made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from common.text import on_one_line, printable, without_secrets

# What other trainers call settings of a recipe.
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_grad_norm": "train.clip",
    "gradient_clipping": "train.clip",
    "warmup_steps": "train.warmup_ratio",
    "lr_scheduler_type": "train.schedule",
    "optim": "train.optimizer",
    "adam_epsilon": "train.eps",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "eval_steps": "train.eval_every",
    "logging_steps": "train.log_every",
    "max_seq_length": "data.block",
    "max_length": "data.block",
    "block_size": "data.block",
    "seq_len": "data.block",
    "sequence_len": "data.block",
    "cutoff_len": "data.block",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "precision": "model.dtype",
    "gradient_accumulation_steps": "train.micro_batch",
    "per_device_eval_batch_size": "train.micro_batch",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "report_to": "train.wandb",
    "loss_type": "objective.name",
    "val_fraction": "data.validation_fraction",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "gradient_checkpointing": "model.activation_checkpointing",
    "output_dir": "run_dir",
}
LONGEST = 1500  # characters of a line


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what is wrong, where, what to set.

    The line may quote data and other programs: secrets, and what could act on a terminal, are left out, and
    the middle of what is very long. `code` names the kind of mistake for programs and tests: it stays when
    the wording changes.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        text = without_secrets(on_one_line(super().__str__()))
        if len(text) <= LONGEST:
            return text
        return f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"  # its end says what to do


class FailureError(UserError):
    """A failure of the machine, a full disk for example: once it is cured, the same command resumes."""


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The text of an error without line breaks, at most `limit` characters; its type where it has none.

    As in a UserError, nothing in it can act on a terminal, and secrets are taken out.
    """
    text = without_secrets(" ".join(str(error).split()))
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return printable(text if len(text) <= limit else text[: limit - 3] + "...")


def nearest(name: str, options: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a hint at the known name that was probably meant, or at all of them.

    elsewhere: what other programs call something, and what it is called here. Case does not matter.
    """
    names = {str(key).lower(): str(key) for key in options}
    if not names:
        return "there are none"
    meanings = {**elsewhere, **names}
    for cutoff, candidates in ((0.8, meanings), (0.5, names)):
        if close := difflib.get_close_matches(name.lower()[:200], candidates, n=1, cutoff=cutoff):
            return f"did you mean {meanings[close[0]]}?"
    return f"known: {', '.join(names.values())}"
