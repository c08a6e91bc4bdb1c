"""The meaning of every key in metrics.jsonl, for the documentation.

`Metrics` writes the records. tests/unit/pipeline/test_monitor.py compares their keys with these tables.
"""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """A key of a record. The parts of a nested key are joined by dots, and NAME is any name."""

    unit: str
    meaning: str
    present: str = "always"


TOKEN = "nats per token"
SEVERAL_DOMAINS = "the data has several domains"
SEVERAL_RANKS = "several ranks"
WEIGHTED = "the objective weights tokens"
AFTER = "after step 0, for the same documents"

# A record of the steps since the previous record.
TRAINING = {
    "time": Key("s", "Time of the record, in seconds since 1970 (UTC)."),
    "epoch": Key("passes", "Passes over the training data so far."),
    "step": Key("steps", "Optimizer steps so far."),
    "tokens": Key("tokens", "Supervised tokens so far."),
    "lr": Key("", "Learning rate of the step. With Muon, the rate of AdamW."),
    "loss": Key("per token", "Mean of the training objective over supervised tokens."),
    "nll": Key(TOKEN, "Mean negative log-likelihood of the data. All objectives can be compared by it."),
    "perplexity": Key("", "exp(`nll`)."),
    "demd": Key(
        "cost",
        "Mean cost to move the model's probabilities to the target. `null` if it is not computed.",
    ),
    "divergence": Key(
        TOKEN,
        "Mean divergence from the teacher, unweighted. `tv` and `demd_dense` are not in nats.",
        "the objective has a teacher",
    ),
    "grad_norm": Key("", "Mean gradient norm before clipping. With Muon, the norm of the update."),
    "grad_norm_max": Key("", "Largest of these norms."),
    "skipped": Key("steps", "Steps that did not change the weights because the gradient was not finite."),
    "tokens_per_s": Key(
        "tokens/s", "Supervised tokens per second of all ranks, without the time of validation and saving."
    ),
    "weight_p50": Key("", "Median of the token weights.", WEIGHTED),
    "weight_p99": Key("", "99th percentile of the token weights.", WEIGHTED),
    "weight_max": Key("", "Largest token weight.", WEIGHTED),
    "weight_capped": Key(
        "0 to 1", "Share of the tokens whose weight is at the limit.", "some weight is at it"
    ),
    "written_tokens": Key("tokens", "Tokens that the model generated for training.", "`objective.on_policy`"),
    "writing_seconds": Key("s", "Time of this generation.", "`objective.on_policy`"),
    "domains.NAME.tokens": Key(
        "tokens", "Supervised tokens of the domain so far, weighted.", SEVERAL_DOMAINS
    ),
    "domains.NAME.nll": Key(TOKEN, "`nll` of the domain.", SEVERAL_DOMAINS),
    "domains.NAME.loss": Key("per token", "`loss` of the domain.", SEVERAL_DOMAINS),
    "mfu": Key(
        "0 to 1",
        "Model FLOPs over the peak of the GPUs. Recomputed activations do not count.",
        "`emo plan` knows the GPU",
    ),
    "memory_gib": Key("GiB", "Peak memory that PyTorch allocated on rank 0's GPU in this launch.", "on GPUs"),
    "rank_seconds_max": Key(
        "s", "Time per step of the slowest rank, without waiting for other ranks.", SEVERAL_RANKS
    ),
    "rank_seconds_median": Key("s", "The same time of the median rank.", SEVERAL_RANKS),
    "slowest_rank": Key("", "Number of the slowest rank.", SEVERAL_RANKS),
    "slowest_host": Key("", "Host of the slowest rank.", SEVERAL_RANKS),
}
# A record of a pass over a validation set.
VALIDATION = {key: TRAINING[key] for key in ("time", "epoch", "step", "tokens")} | {
    "set": Key("", "Name of the validation set."),
    "validation_loss": Key("per token", "Mean of the training objective over the set."),
    "validation_nll": Key(TOKEN, "Mean negative log-likelihood of the set."),
    "validation_perplexity": Key("", "exp(`validation_nll`)."),
    "validation_demd": Key("cost", "`demd` of the set."),
    "validation_divergence": Key(TOKEN, "`divergence` of the set.", "the objective has a teacher"),
    "validation_kl_from_base": Key(
        TOKEN,
        "Mean KL(base, model), where base is the model before training. 0 means that no prediction changed. "
        "With stored scores it is a lower limit.",
        "LoRA, `objective.teacher: base` or `train.kl_from_base`",
    ),
    "validation_change": Key(
        TOKEN,
        "Change of `validation_nll` since step 0, paired by document. An increase is forgetting.",
        AFTER,
    ),
    "validation_change_low": Key(
        TOKEN, "Lower limit of its 95 % interval. `null` with fewer than 5 documents.", AFTER
    ),
    "validation_change_high": Key(TOKEN, "Upper limit of its 95 % interval.", AFTER),
}
# Values on the console, and the key with the same value.
CONSOLE = {
    "loss": "`loss` since the last record. `not finite` is NaN or infinity.",
    "tokens/s": "`tokens_per_s` over the last 20 steps.",
    "left": "Estimated time to the last step, with validation and saving.",
    "validation at, save at": "The next step with a validation or a checkpoint.",
    "NLL": "`validation_nll`.",
    "perplexity": "`validation_perplexity`.",
    "DEMD": "`validation_demd`, the differentiable earth mover distance.",
    "divergence": "`validation_divergence`, the distance from the teacher. It is not a sign of instability.",
    "KL from base": "`validation_kl_from_base`, how far the predictions are from those before training.",
    "NLL since step 0": "`validation_change` and its 95 % interval.",
    "sample": "How the model continued the first of `train.sample_prompts`.",
}
# Objects that `emo train --json` prints. Each has `event` and `time`.
EVENTS = {
    "train": "A training record.",
    "validation": "A validation record.",
    "sample": "`step` and `text` of a continuation.",
    "message": "`level` and `text` of any other line.",
    "log": "`path` of the log of compilers and libraries.",
    "saved": "`step` and `path` of a complete checkpoint.",
    "stopping": "`step` and `reason` of a stop request. A checkpoint follows.",
    "stopped": "`reason`, and `step` if a step was taken: the run can resume.",
    "failed": "`reason` why the previous launch failed. The run resumes.",
    "finished": "`export`, the directory of the trained model.",
}
