"""Keys of other trainers: their names here, or what to do instead."""

from __future__ import annotations

from .objective_names import NO_PREFERENCES

# Keys of a recipe, and their names in other trainers.
_FOREIGN_NAMES = {
    "output_dir": "run_dir output_path out",
    "data.sequence_len": "max_seq_length max_seq_len max_length block_size seq_len seq_length cutoff_len "
    "model_max_length block",
    "data.sources": "train_file data_path datasets dataset dataset_name train_dataset pretraining_dataset",
    "data.validation_fraction": "val_fraction val_set_size val_size test_size",
    "data.limit_rows": "max_samples max_train_samples",
    "data.dir": "dataset_prepared_path tokenized_path",
    "data.template": "chat_template prompt_template",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "model.path": "base_model model_name_or_path model_name model_id pretrained",
    "model.dtype": "bf16 fp16 precision mixed_precision torch_dtype",
    "model.attn_implementation": "flash_attention flash_attn flash_attn_2 sdp_attention",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.neftune_noise_alpha": "neftune neftune_alpha noisy_embedding_alpha",
    "model.rope": "rope_scaling rope_parameters overrides_of_model_config",
    "model.rope.theta": "rope_theta",
    "model.rope.type": "rope_type",
    "model.kernels": "use_liger use_liger_kernel enable_liger_kernel liger_rope liger_rms_norm "
    "liger_layer_norm liger_glu_activation liger_swiglu liger_fused_linear_cross_entropy",
    "data.root": "dataset_dir",
    "model.lora": "adapter peft peft_config use_peft finetuning_type qlora",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.path": "adapter_name_or_path lora_model_dir adapter_path",
    "model.lora.train_embeddings": "lora_modules_to_save modules_to_save additional_target "
    "trainable_token_indices peft_trainable_token_indices",
    "model.lora.use_dora": "dora peft_use_dora",
    "model.lora.loraplus_lr_ratio": "loraplus lora_plus_ratio",
    "model.lora.use_rslora": "rslora lora_use_rslora peft_use_rslora",
    "model.lora.targets": "lora_target lora_target_modules lora_target_linear target_modules",
    "objective.name": "loss_type loss",
    "train.learning_rate": "lr",
    "train.global_batch_size": "batch_size train_batch_size batch",
    "train.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size micro_batch",
    "train.num_train_epochs": "epochs num_epochs max_epochs",
    "train.max_steps": "steps max_iters",
    "train.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad grad_clip clip",
    "train.lr_scheduler_type": "lr_scheduler schedule",
    "train.warmup_steps": "num_warmup_steps warmup_iters",
    "train.decay_steps": "num_decay_steps",
    "train.min_lr_ratio": "min_lr min_lr_rate cosine_min_lr_ratio lr_scheduler_kwargs",
    "train.optimizer": "optim",
    "train.eps": "adam_epsilon",
    "train.betas": "adam_beta1 adam_beta2",
    "train.logging_steps": "log_every log_interval",
    "train.eval_steps": "eval_every eval_interval eval_strategy evaluation_strategy evals_per_epoch",
    "train.save_steps": "save_every save_interval save_strategy saves_per_epoch",
    "train.save_total_limit": "keep_last",
    "train.keep_best": "metric_for_best_model save_best greater_is_better",
    "train.load_best_at_end": "load_best_model_at_end",
    "train.early_stopping": "early_stopping_patience early_stopping_threshold",
    "train.report_to": "tensorboard wandb use_wandb mlflow trackio use_mlflow",
    "train.project": "wandb_project",
}
AMBIGUOUS = {"name", "path"}  # keys that occur in many sections
# Known keys by foreign names, and by their own last part, which helps if a key is in the wrong section.
KEYS_BY_NAME = {
    name: key
    for key, names in _FOREIGN_NAMES.items()
    for name in ({key.rpartition(".")[2]} - AMBIGUOUS) | set(names.split())
}
_QUANTISED = "set model.lora.base_dtype=nf4 to train adapters on 4-bit weights; 8 bits are not supported"
_PACKED = "remove it: rows are packed, and documents do not attend to each other. Set data.packing=none for "
_PACKED += "one document per row"
_ANSWERS = "remove it: data.kind=instruct supervises answers, each with the token that ends it, "
_ANSWERS += "and data.kind=text every token"
_WORKERS = "remove it: `emo prepare --workers N` sets how many processes prepare the data"
# Keys of other trainers without a counterpart, and what to do instead.
UNSUPPORTED_KEYS = {
    name: hint
    for names, hint in {
        "load_in_4bit load_in_8bit quantization_bit bnb_4bit_compute_dtype bnb_config": _QUANTISED,
        "rl dpo_beta ref_model reward_model kl_coef rlhf dpo kto orpo grpo ppo": NO_PREFERENCES,
        "sample_packing packing eval_packing eval_sample_packing pad_to_sequence_len neat_packing "
        "group_by_length": _PACKED,
        "train_on_inputs train_on_input assistant_only_loss completion_only_loss train_on_prompt "
        "roles_to_train train_on_eos train_on_eot": _ANSWERS,
        "preprocessing_num_workers dataset_num_proc dataset_processes num_proc": _WORKERS,
        "sources.type": "remove it: set data.kind, data.template and columns instead",
        "enable_thinking": "set data.template_variables={enable_thinking: true}, or false",
        "ddp_timeout": "set train.timeout_minutes, in minutes instead of seconds",
        "gradient_accumulation_steps grad_accum gradient_accumulation": "remove it: it "
        "follows from train.global_batch_size (rows per step on all ranks) and train.micro_batch_size",
        "resume resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir": "remove it: the "
        "same command resumes from the newest checkpoint, and another output_dir starts a new run",
        "trust_remote_code": "custom code is never run; use a model that transformers supports",
        "fsdp fsdp_config": "FSDP is not supported: set deepspeed=ds_configs/zero3.json instead",
        "push_to_hub hub_model_id hub_token": "remove it, and upload the export after training",
        "tf32 use_cache do_train do_eval stage trainer": "remove it: it is not configurable",
    }.items()
    for name in names.split()
}
# Parts of unsupported values, and what to do instead.
UNSUPPORTED_VALUES = {
    "constant_with_warmup": "constant has a warm-up too",
    "min_lr": "set lr_scheduler_type=cosine and train.min_lr_ratio",
    "wsd": "set lr_scheduler_type=warmup_stable_decay",
    "8bit": "the 8-bit optimizers are adamw_8bit and paged_adamw_8bit",
    "paged": "set deepspeed=ds_configs/zero3_offload.json to keep the optimizer in host memory",
}
