"""Names that verl 0.9, OpenRLHF 0.11, TRL 1.16 and slime give to what is a key here, so that a refusal can name it.

Only options that mean the same are listed; the number may still need a conversion, as a batch counted in responses instead of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

VALUES: Mapping[str, str] = {
    "group_norm": "grpo",
    "grpo_passk": "pass_at_k",
    "grpo_vectorized": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo_vectorized": "rloo",
    "vanilla": "surrogate",
}
"""Value of verl's `adv_estimator` or `loss_mode`, of OpenRLHF's `algo.advantage.estimator`, or of a paper -> ours."""

KEYS: Mapping[str, str] = {
    # run
    "max_steps": "run.steps",
    "num_rollout": "run.steps",
    "total_training_steps": "run.steps",
    "default_local_dir": "run.dir",
    "output_dir": "run.dir",
    "hf_checkpoint": "model.path",
    "model_name_or_path": "model.path",
    # data and scores
    "prompt_data": "task.path",
    "prompt_dataset": "task.path",
    "train_files": "task.path",
    "val_files": "evaluation.path",
    "eval_prompt_data": "evaluation.path",
    "input_key": "task.columns.question",
    "label_key": "task.columns.answer",
    "apply_chat_template": "task.chat_template",
    "apply_chat_template_kwargs": "task.chat_template_kwargs",
    "custom_reward_function": "scoring.scorer",
    "remote_url": "scoring.scorer",
    "agent_func_path": "environment.kind",
    # rollout
    "train_batch_size": "rollout.groups_per_step",
    "rollout_batch_size": "rollout.groups_per_step",
    "n": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "dynamic_filtering_enable": "rollout.filter_equal",
    "num_engines": "engines.count",
    "rollout_num_gpus_per_engine": "engines.tp",
    "vllm_tensor_parallel_size": "engines.tp",
    # objective
    "adv_estimator": "objective.advantage",
    "advantage_estimator": "objective.advantage",
    "loss_agg_mode": "objective.aggregation",
    "loss_mode": "objective.loss",
    "policy_loss_type": "objective.loss",
    "clip_ratio": "objective.clip_low",
    "clip_ratio_low": "objective.clip_low",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_c": "objective.dual_clip",
    "eps_clip": "objective.clip_low",
    "eps_clip_high": "objective.clip_high",
    "eps_clip_c": "objective.dual_clip",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "beta": "objective.kl.coefficient",
    "init_coef": "objective.kl.coefficient",
    "kl_coef": "objective.kl.coefficient",
    "kl_loss_coef": "objective.kl.coefficient",
    "kl_loss_type": "objective.kl.estimator",
    "rollout_is_threshold": "objective.correction.cap",
    "tis_clip": "objective.correction.cap",
    "vllm_importance_sampling_clip_max": "objective.correction.cap",
    "ppo_mini_batch_size": "objective.updates_per_batch",
    # trainer
    "learning_rate": "trainer.optimizer.lr",
    "max_grad_norm": "trainer.optimizer.clip_grad",
    "max_tokens_per_gpu": "trainer.tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "trainer.tokens_per_microbatch",
    "tensor_model_parallel_size": "trainer.tp",
    "pipeline_model_parallel_size": "trainer.pp",
    "context_parallel_size": "trainer.cp",
    "expert_model_parallel_size": "trainer.ep",
    "save_freq": "trainer.checkpoint_every",
    "save_interval": "trainer.checkpoint_every",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "test_freq": "evaluation.every",
    "eval_interval": "evaluation.every",
    "eval_steps": "evaluation.every",
    # telemetry
    "project_name": "telemetry.wandb.project",
    "wandb_project": "telemetry.wandb.project",
}
"""Last part of an option's name, with underscores -> key here."""
