"""All functions of megalite that branch on the device type, with the test that runs the accelerator's branch.

tests/standin/test_device_branches.py finds these functions in the source and asserts that they are listed here.
"""

# Called by a run on the stand-in accelerator (tests/standin/test_whole_life.py).
ON_THE_STANDIN = {
    "checkpoint/staging.py:HostBuffer.reserve",
    "checkpoint/reader.py:CheckpointReader._fill",
    "checkpoint/staging.py:Staging.begin",
    "checkpoint/staging.py:Staging.hold_update",
    "cli/doctor.py:_proved",
    "cli/doctor.py:_used",
    "data/batches/transfer.py:ArrivingBatch.ready",
    "data/batches/transfer.py:BatchTransfer.__init__",
    "monitor/memory.py:device_memory",
    "monitor/profiler.py:StepProfile._start",
    "monitor/profiler.py:StepProfile._write",
    "monitor/step_tracer.py:_DeviceClock.__init__",
    "monitor/step_tracer.py:clock_of",
    "generation/sampling.py:_most_likely",
    "generation/sampling.py:_rows_at_once",
    "ops/choice.py:Operators.documents",
    "ops/attention_backends.py:served_on_device",
    "ops/chunked_attention.py:pieces",
    "ops/cross_entropy.py:shard_statistics",
    "ops/decode_attention.py:compiled_serves",
    "ops/extension.py:why_not",
    "parallel/device.py:accelerator_id",
    "parallel/device.py:local_device",
    "parallel/gradient_sums.py:embedding",
    "parallel/host_copies.py:on_device",
    "parallel/mesh.py:ParallelMesh.over_world",
    "parallel/random.py:normal_slice",
    "selftest/trust.py:card_capability",
    "selftest/trust.py:card_name",
    "selftest/trust.py:driver_version",
    "selftest/trust.py:needs_proof",
    "train/optimizer/adamw.py:_written_copies",
    "train/step/precision.py:choose_precision",
    "train/report.py:RunReporter.__init__",
    "train/report.py:RunReporter.predict",
    "train/report.py:device_name",
    "train/report.py:_peak_flops_per_second",
    "train/rank.py:_tell_choices",
    "train/step/rank_measures.py:RankMeasures.__init__",
    "train/step/rank_measures.py:RankMeasures.measure_memory",
}

# Test -> the functions whose branch for an accelerator, or for CUDA alone, it runs.
TESTED = {
    (
        "tests/standin/test_experts.py",
        "test_one_product_for_all_experts_is_a_product_for_each",
    ): ("ops/expert_products.py:_in_one_product",),
    (
        "tests/unit/ops/test_document_blocks.py",
        "test_the_host_does_not_wait_to_leave_keys_out",
    ): ("ops/documents.py:first_key",),
    (
        "tests/kernels/test_apex.py",
        "test_a_cpu_has_no_use_for_it",
    ): ("ops/apex.py:why_not.<locals>.why_not_on",),
    (
        "tests/end_to_end/test_training_from_python.py",
        "test_a_script_starts_ranks_and_hears_of_what_any_of_them_does",
    ): ("train/run.py:_computes_after_fork",),
    (
        "tests/kernels/test_attention.py",
        "test_a_chip_whose_blocks_have_too_little_shared_memory_is_said",
    ): ("ops/packed_attention.py:_why_too_large",),
    (
        "tests/kernels/test_attention.py",
        "test_what_cuda_has_no_kernel_for_is_said",
    ): ("ops/packed_attention.py:why_not_packed",),
    (
        "tests/standin/test_inference_dtype.py",
        "test_a_model_runs_in_its_own_16_bits_or_in_bfloat16_on_an_accelerator",
    ): ("generation/inference_dtype.py:inference_dtype",),
    (
        "tests/standin/test_inference_dtype.py",
        "test_a_command_says_what_it_chose",
    ): ("generation/inference_dtype.py:inference_notes",),
    (
        "tests/unit/train/step/test_precision.py",
        "test_tf32_is_set_for_cuda_alone_and_taken_back_by_the_next_run",
    ): ("train/step/precision.py:set_tf32",),
    (
        "tests/unit/monitor/test_profiler.py",
        "test_a_card_has_a_snapshot_of_its_allocator",
    ): ("monitor/profiler.py:StepProfile._start",),
    (
        "tests/unit/monitor/test_profiler.py",
        "test_a_card_whose_tracer_is_silent_is_named",
    ): ("monitor/profiler.py:StepProfile._write",),
    (
        "tests/unit/monitor/test_memory.py",
        "test_other_errors_stay_as_they_are",
    ): ("monitor/memory.py:exhausted_memory_explained",),
    (
        "tests/standin/test_offload.py",
        "test_offloaded_activations_change_no_bit",
    ): (
        "model/offload.py:OffloadedGraph._pack",
        "model/offload.py:_HostStorage.__init__",
        "model/offload.py:_HostStorage.leave",
        "model/offload.py:_HostStorage.read",
    ),
    (
        "tests/standin/test_parity.py",
        "test_a_job_is_equal_to_the_cpu_to_the_bit",
    ): ("train/optimizer/muon.py:make",),
    (
        "tests/standin/test_parity.py",
        "test_the_branches_of_an_accelerator_compute_the_same",
    ): (
        "ops/attention.py:compiled_pays",
        "ops/cross_entropy.py:visits_rows_once",
        "parallel/cross_entropy.py:_is_one",
    ),
    (
        "tests/standin/test_row_overlap.py",
        "test_a_chunk_is_summed_while_the_next_one_is_multiplied",
    ): ("parallel/layers.py:chunks_per_sequence",),
    (
        "tests/standin/test_micro_batch.py",
        "test_a_card_is_tried",
    ): (
        "train/step/micro_batch.py:_MicroBatchChoice._planned_bytes",
        "train/step/trial.py:trial_bytes",
    ),
    (
        "tests/standin/test_micro_batch.py",
        "test_a_card_says_what_is_free",
    ): (
        "monitor/memory.py:empty_cache",
        "monitor/memory.py:free_bytes",
    ),
    (
        "tests/standin/test_selftest.py",
        "test_operators_prove_themselves_on_an_accelerator",
    ): (
        "selftest/clock.py:_seconds",
        "selftest/clock.py:device_seconds",
        "selftest/worker.py:main",
    ),
    (
        "tests/standin/test_calibration.py",
        "test_each_part_is_measured_on_an_accelerator",
    ): (
        "train/step/calibrate.py:group_times",
        "train/step/calibrate.py:this_machine",
        "train/step/part_times.py:RankClock._once",
    ),
    (
        "tests/unit/selftest/test_clock.py",
        "test_a_card_is_held_until_all_is_queued",
    ): ("selftest/clock.py:hold",),
    (
        "tests/unit/checkpoint/test_staging.py",
        "test_it_is_locked_as_long_as_it_lives",
    ): (
        "checkpoint/staging.py:_lock",
        "checkpoint/staging.py:_unlock",
    ),
    (
        "tests/unit/ops/test_attention_backends.py",
        "test_what_torch_lacks_is_said",
    ): ("ops/attention_backends.py:Backend.why_not_on",),
    (
        "tests/unit/ops/test_attention_backends.py",
        "test_who_serves",
    ): (
        "ops/attention_backends.py:_chip",
        "ops/attention_backends.py:_why_not_flash",
    ),
    (
        "tests/unit/ops/test_extension.py",
        "test_every_gpu_that_torch_sees_has_to_run_them",
    ): ("ops/extension.py:built_for_visible_cards",),
    (
        "tests/unit/ops/test_int8.py",
        "test_on_other_devices_the_weight_is_dequantised",
    ): ("ops/linear.py:compiled_pays",),
    (
        "tests/unit/ops/test_liger.py",
        "test_where_it_is_not_installed_it_says_so",
    ): ("ops/liger.py:why_not",),
    (
        "tests/unit/train/optimizer/test_deepspeed_gather.py",
        "test_on_an_accelerator_and_without_copies_deepspeed_gathers",
    ): ("train/optimizer/deepspeed_gather.py:_all_gather",),
    (
        "tests/unit/selftest/test_selftest.py",
        "test_a_device_that_is_not_here_is_refused",
    ): ("cli/selftest.py:_device",),
}
