"""The errors that a user sees as a line, and how their line is made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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


def nearest(given: str, known: Iterable[str], of_recipe: bool = False) -> str:
    """A hint at the known name that was probably meant, or all of them.

    of_recipe: it is a key of a recipe, and may be what other trainers call one.
    """
    names = [str(name) for name in known]
    if not names:
        return "there are none"
    others = OTHER_NAMES if of_recipe else {}
    close = difflib.get_close_matches(given.lower()[:200], [*names, *others], n=1, cutoff=0.8)
    if close and close[0] not in names:
        return f"did you mean {others[close[0]]}?"
    near = difflib.get_close_matches(given[:200], names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
