"""Arguments of Megatron-LM and Megatron-DeepSpeed that change nothing here, and those that cannot be taken.

Names are written without the two hyphens, as in arguments.py of Megatron-LM (core 0.8 to 0.19 and 23.04) and of
Megatron-DeepSpeed.
"""

_REPORTS = "megalite reports every step itself (metrics.jsonl; monitor.tensorboard)"
_LAUNCH = "the launcher and the process groups are megalite's (megalite launch, [launch])"
IDLE = {
    _REPORTS: """
        app-tag-run-name app-tag-run-version config-logger-dir disable-filter-warnings disable-straggler-on-startup
        dump-param-to-param-group-map logging-level memory-keys modules-to-filter no-barrier-with-level-1-timing
        no-filter-warnings no-one-logger run-workload-inspector-server runtime-time-unit save-activations-interval
        save-config-filepath save-dgrads-interval save-params-interval save-tokens-per-expert-interval
        save-wgrads-interval set-level-for-all-loggers tensorboard-log-interval tensorboard-queue-size
        throughput-window-size timing-log-level timing-log-option""",
    "it profiles; megalite has megalite doctor and metrics.jsonl": """
        memory-snapshot-path nvtx-ranges profile pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
        pytorch-profiler-collect-shapes record-memory-history record-shapes use-pytorch-profiler""",
    "megalite has its own operators and chooses them itself (model.kernels)": """
        activation-func-fp8-input-store apply-query-key-layer-scaling apply-rope-fusion attention-backend
        attention-softmax-in-fp32 autocast-dtype batch-invariant-backend batch-invariant-mode bias-activation-fusion
        bias-dropout-fusion check-for-large-grads check-for-spiky-loss check-weight-hash-across-dp-replicas-interval
        cpu-torch-adam cross-entropy-fusion-impl cross-entropy-loss-fusion deterministic-mode
        disable-attention-softmax-in-fp32 disable-bf16-reduced-precision-matmul disable-check-for-nan-in-loss
        disable-cuda-graph-use-single-mempool disable-jit-fuser disable-mamba-mem-eff-path disable-mem-efficient-ln
        ds-fused-adam enable-cuda-graph enable-experimental external-cuda-graph flash-attention-version flash-decode
        fused-residual-rmsnorm fused-single-qkv-rope gpu-sniff-test-interval gradient-accumulation-fusion
        kitchen-attention-backend kitchen-config-file kitchen-recipe-number masked-softmax-fusion
        memory-efficient-layer-norm mlp-chunks-for-prefill mlp-chunks-for-training no-attention-softmax-in-fp32
        no-bias-dropout-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss no-check-for-nan-in-loss-and-grad
        no-cuda-graph-use-single-mempool no-gradient-accumulation-fusion no-masked-softmax-fusion no-persist-layer-norm
        no-query-key-layer-scaling no-rope-fusion onnx-safe optimizer-cuda-graph persist-layer-norm pipeline-dtype
        te-rng-tracker transformer-impl use-flash-attn use-flash-attn-builder use-flash-attn-triton use-flash-attn-v1
        use-flash-attn-v2 use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
        use-grouped-gemm-for-shared-expert use-kitchen use-kitchen-attention use-legacy-models use-mcore-models
        use-precision-aware-optimizer use-te-activation-func use-te-rng-tracker use-torch-optimizer-for-cpu-offload
        use-transformer-engine-op-fuser""",
    "megalite overlaps and buckets communication itself": """
        cp-comm-type create-all-gather-group ddp-average-in-collective ddp-bucket-size ddp-impl ddp-num-buckets
        ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation deallocate-pipeline-outputs defer-embedding-wgrad-compute
        delay-grad-reduce delay-param-gather delay-wgrad-compute disable-align-grad-reduce
        disable-async-tensor-model-parallel-allreduce disable-batch-p2p-comm disable-batch-p2p-sync
        disable-clone-scatter-output-in-embedding disable-symmetric-registration distribute-checkpointed-activations
        distribute-saved-activations enable-full-sharding-in-hsdp fake-process-group finalize-model-grads-func
        fsdp-double-buffer fsdp-manual-registration grad-scale-func grad-sync-func hierarchical-context-parallel-sizes
        high-priority-a2a-comm-stream high-priority-stream-groups keep-fp8-transpose-cache max-seqlen-per-dp-cp-rank
        microbatch-group-size-per-virtual-pipeline-stage nccl-communicator-config-path no-align-grad-reduce
        no-align-param-gather no-async-tensor-model-parallel-allreduce no-batch-p2p-comm no-batch-p2p-sync
        no-clone-scatter-output-in-embedding no-contiguous-buffers-in-local-ddp no-delay-grad-reduce
        no-gradient-reduce-div-fusion no-overlap-p2p-communication no-scatter-gather-tensors-in-pipeline no-sync-func
        no-use-layer-wise-param-layout num-distributed-optimizer-instances outer-dp-sharding-strategy param-sync-func
        pipeline-model-parallel-comm-backend reuse-grad-buf-for-mxfp8-param-ag sharp-enabled-group
        suggested-communication-unit-size symmetric-ar-type tensor-parallel-num-weight-shards timers
        torch-fsdp2-no-reshard-after-forward use-contiguous-buffers-in-ddp use-nccl-ub use-ring-exchange-p2p use-sharp
        use-tp-pp-dp-mapping variable-seq-lengths wgrad-deferral-limit zero-allgather-bucket-size
        zero-contigious-gradients zero-reduce-bucket-size zero-reduce-scatter""",
    _LAUNCH: """
        adlr-autoresume adlr-autoresume-interval calc-ft-timeouts disable-gloo-process-groups disable-manual-gc-eval
        distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
        empty-unused-memory-level enable-ft-package error-injection-rate error-injection-type exit-signal
        exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training ft-num-warmup-iters
        kill-switch-file lazy-mpu-init local-rank manual-gc manual-gc-interval no-initialization no-manual-gc-eval
        otel-enabled otel-service-name otel-span-groups rerun-mode result-rejected-tracker-filename test-mode
        train-sync-interval use-cpu-initialization""",
    "checkpoints are megalite's own; megalite convert import reads theirs": """
        async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-save async-strategy
        auto-detect-ckpt-format ckpt-assume-constant-structure ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state ckpt-format ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group
        ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path ckpt-step disable-ckpt-load-validate-sharding-integrity
        disable-load-optim disable-load-rng disable-msc disable-save-optim disable-save-rng
        disable-save-tokenizer-assets disable-strict-fsdp-dtensor-load disable-use-tokenizer-model-from-checkpoint-args
        dist-ckpt-format dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness
        dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient enable-msc exit-on-missing-checkpoint
        hetereogenous-dist-checkpoint load-main-params-from-ckpt load-tag most-recent-k no-ckpt-fully-parallel-save
        no-ckpt-load-validate-sharding-integrity no-load-lr-state no-load-optim no-load-rng no-save-optim no-save-rng
        no-save-tokenizer-assets no-strict-fsdp-dtensor-load no-use-tokenizer-model-from-checkpoint-args
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
        non-persistent-local-ckpt-dir non-persistent-save-interval override-ckpt-iteration override-lr-scheduler
        override-opt-param-scheduler persistent-save-interval replication replication-factor replication-jump
        reset-iteration save-retain-interval universal-checkpoint use-checkpoint-args use-checkpoint-lr-scheduler
        use-checkpoint-opt-param-scheduler use-dist-ckpt use-mp-args-from-checkpoint-args use-persistent-ckpt-worker
        verify-integrity""",
    "megalite reads and caches the data itself": """
        allow-ambiguous-pad-tokens aml-data-download-path data-cache-path data-impl dataloader-defer-npy-index-mmap
        dataloader-fast-cache-load disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        legacy-tokenizer mid-level-dataset-surplus mmap-warmup no-create-attention-mask-in-dataloader no-mmap-bin-files
        no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id null-tokenizer-pad-id
        num-dataset-builder-threads num-workers object-storage-cache-path per-dataset-sequences-path
        repeated-dataloader return-data-index s3-cache-path test-data-path tiktoken-num-special-tokens tiktoken-pattern
        tiktoken-special-tokens tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens
        tokenizer-hf-no-use-fast tokenizer-hf-use-fast tokenizer-metadata tokenizer-sentencepiece-legacy
        trust-remote-code use-dataset-only use-gigatoken""",
    "it chooses how memory is used; the numbers stay the same (training.recompute)": """
        activation-offload-fraction checkpoint-in-cpu checkpoint-num-layers contigious-checkpointing cpu-offloading
        cpu-offloading-double-buffering cpu-offloading-num-layers cpu-offloading-retain-pinned-cpu-buffers
        cpu-offloading-weights deepspeed-activation-checkpointing delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks disable-cpu-offloading-activations ep-overlap-early-attn-memory-release
        fine-grained-activation-offloading fine-grained-offloading-max-inflight-offloads
        fsdp-db-use-persist-buf-on-alloc-fail init-model-with-meta-device memory-centric-tiled-linear
        min-offloaded-tensor-size no-cpu-offloading-activations no-pin-cpu-grads no-pin-cpu-params
        num-microbatches-with-partial-activation-checkpoints offload-modules optimizer-offload-fraction
        partition-activations recompute-modules remote-device scattered-embeddings split-transformers
        synchronize-each-layer tile-factor use-pin-memory""",
    "the models of this script have none of it": """
        bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim biencoder-shared-query-context-model
        block-data-path cache-mla-latents classes-fraction create-moe-param-group data-per-class-fraction
        decode-only-cuda-graphs decoder-seq-length disable-chunked-prefill disable-fp8-wgrad disable-moe-token-dropping
        disable-moe-top2-2nd-expert-sampling disable-parameter-transpose-cache ds-inference
        ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading embedding-path enable-chunked-prefill
        enable-expert-tensor-parallelism evidence-data-path experimental-attention-variant-loss-scale-func
        force-ds-sequence-parallel head-lr-mult hidden-size-teacher hybrid-attention-ratio hybrid-mlp-ratio img-dim
        img-h img-w indexer-batch-size indexer-log-interval iter-per-epoch
        keep-fp8-transpose-cache-when-using-custom-fsdp kv-lora-rank load-teacher mask-factor mask-prob mask-type
        max-tokens-to-oom mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num
        mhc-sinkhorn-iterations mla-down-proj-fusion mlp-type mrope-section mscale mscale-all-dim
        nccl-all-reduce-for-prefill no-data-sharding no-fp8-wgrad no-yarn-correction-range-round-to-int
        num-attention-heads-teacher num-channels num-classes num-experts-teacher num-layers-at-end-in-bf16
        num-layers-at-start-in-bf16 num-layers-teacher num-speculative-tokens output-bert-embeddings patch-dim
        q-lora-rank qk-head-dim qk-pos-emb-head-dim quant-recipe query-in-block-prob refit-method
        relative-attention-max-distance relative-attention-num-buckets rotary-scaling-factor sample-rate
        sft-tokenizer-prompt-format short-seq-prob swin-backbone-type titles-data-path topk tp-only-amax-red
        train-desc-path train-doc-idx-path train-idx-path train-sample-idx-path train-shuffle-idx-path
        use-inference-optimized-layers use-legacy-static-engine use-one-sent-docs
        use-same-sampling-seed-across-dp-ranks use-tutel v-head-dim vision-backbone-type vision-pretraining
        vision-pretraining-type vocab-extra-ids""",
}
"""Reason -> arguments without effect here."""

IDLE_PREFIXES = {
    "log-": _REPORTS,
    "disable-log-": _REPORTS,
    "no-log-": _REPORTS,
    "wandb-": _REPORTS,
    "one-logger-": _REPORTS,
    "straggler-": _REPORTS,
    "profile-": _REPORTS,
    "flight-recorder-": _LAUNCH,
    "disable-flight-recorder-": _LAUNCH,
    "no-flight-recorder-": _LAUNCH,
    "cuda-graph-": "megalite has its own operators and chooses them itself (model.kernels)",
    "muon-": "the optimizer is not muon",
    "fim-": "--fim-data is off",
    "yarn-": "it belongs to --multi-latent-attention",
    "kd-": "--kd is off",
    "overlap-": "megalite overlaps communication itself",
    "inference-": "megalite generate and megalite serve have options of their own",
    "mamba-": "the model has no state-space layers",
    "dsa-": "the model has no sparse attention",
    "gdp-": "the model has no linear attention",
    "linear-": "the model has no linear attention",
    "dino-": "the model has no images",
    "ict-": "the model is no retriever",
    "retriever-": "the model is no retriever",
    "retro-": "the model has no retriever (--retro-add-retriever is off)",
    "inprocess-": "megalite launch --restarts starts failed runs again",
    "tp-comm-": "megalite overlaps communication itself",
    "fault-": "it injects faults for tests",
    "logits-load-": "nothing is distilled (--logits-load-dir is off)",
    "logits-save-": "logits are not saved",
    "mtp-": "the model predicts one token (--mtp-num-layers is off)",
    "mup-": "--use-mup is off",
    "qk-clip-": "--qk-clip is off",
    "moe-": "it belongs to --num-experts",
    "fp8-": "it belongs to --fp8-format",
    "fp4-": "it belongs to --fp4-format",
    "rl-": "it belongs to --perform-rl-step",
    "grpo-": "it belongs to --perform-rl-step",
    "langrl-": "it belongs to --perform-rl-step",
    "gtp-": "megalite has no such sharding; the numbers stay the same",
    "expert-": "it belongs to --num-experts",
    "no-dsa-": "the model has no sparse attention",
    "disable-dsa-": "the model has no sparse attention",
    "disable-tp-comm-": "megalite overlaps communication itself",
    "no-tp-comm-": "megalite overlaps communication itself",
    "megatron-fsdp-": "it belongs to --use-megatron-fsdp",
}
"""Prefix -> why the arguments that begin with it have no effect, unless they have a rule of their own."""

REFUSED = {
    ("megalite has no mixture of experts", "train this model elsewhere, or leave out the experts"): """
        moe-use-upcycling mos num-experts num-experts-switch num-moe-experts""",
    ("megalite does not build this kind of model", "choose a decoder of megalite's families"): """
        activation-func activation-func-clamp-value apply-residual-connection-post-layernorm attention-output-gate
        decoder-num-layers embed-layernorm enable-mhc-connections encoder-num-layers experimental-attention-variant
        gated-linear-unit glu-activation glu-linear-offset heterogeneous-block-specs
        heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path hybrid-layer-pattern
        hybrid-override-pattern is-hybrid-model linear-attention-freq mtp-num-layers multi-latent-attention
        no-rope-freq qk-l2-norm quick-geglu retro-add-retriever rope-type rotary-interleaved softmax-scale spec
        squared-relu tokenizer-special-tokens use-mup window-attn-skip-freq""",
    ("megalite computes in bf16, fp16 or fp32", "set training.precision"): """
        embedding-weights-in-fp32 enable-autocast exp-avg-dtype exp-avg-sq-dtype first-last-layers-bf16
        fp16-lm-cross-entropy fp32-residual-connection fp4-format fp4-param-gather fp8-e4m3 fp8-format fp8-hybrid
        fp8-param-gather main-grads-dtype main-params-dtype output-logit-dtype params-dtype te-precision-config-file""",
    ("megalite trains on the next token alone", "leave it out"): """
        data-efficiency-curriculum-learning fim-data freeze-all-layers kd logits-load-dir perform-rl-step qk-clip
        random-ltd sft""",
    ("the batch size stays the same during a run", "set training.global_batch_size"): """
        decrease-batch-size-if-needed rampup-batch-size step-batch-size-schedule""",
    (
        "the parameters have one learning rate and weight decay",
        "write [[optimizer.groups]] with patterns",
    ): """
        apply-wd-to-qk-layernorm decoupled-lr decoupled-min-lr no-weight-decay-cond-type""",
    ("megalite draws initial values as --init-method-std says", "leave it out"): """
        data-parallel-random-init embedding-init-method embedding-init-method-std init-method
        init-method-xavier-uniform output-layer-init-method""",
    ("megalite masks no single tokens in packed text", "leave it out, or set data.document_mask"): """
        eod-mask-loss""",
    ("steps are never skipped on purpose", "leave it out"): """
        iterations-to-skip""",
    ("the arguments stand in another file", "name that file's arguments in the script"): """
        data-args-path per-split-data-args-path phase-transition-iterations yaml-cfg""",
    ("the text is made up", "set data.source"): """
        mock-data""",
    ("it is an older argument that Megatron-LM refuses too", "use today's name"): """
        batch-size model-parallel-size warmup""",
    ("it only measures a trained model", "use megalite evaluate"): """
        inference skip-train""",
}
"""(reason, remedy) -> arguments that would change the numbers."""

REFUSED_LAYOUT = {
    ("megalite has no context parallelism", "use parallel.tensor with parallel.sequence"): """
        context-parallel-size ds-sequence-parallel-fpdt ds-sequence-parallel-size hybrid-context-parallel""",
    ("the layers of a stage are written as a list", "set parallel.layers_per_stage"): """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
        encoder-pipeline-model-parallel-size encoder-tensor-model-parallel-size pipeline-model-parallel-layout
        pipeline-model-parallel-split-rank standalone-embedding-stage virtual-pipeline-model-parallel-size""",
    ("megalite shards by ZeRO", "set deepspeed.zero_optimization.stage 3"): """
        data-parallel-sharding-strategy use-custom-fsdp use-megatron-fsdp use-torch-fsdp2""",
    (
        "optimizer states are offloaded by DeepSpeed",
        "set deepspeed.zero_optimization.offload_optimizer.device cpu",
    ): """
        cpu-optimizer optimizer-cpu-offload""",
    (
        "megalite has zero-bubble schedules of its own",
        "set parallel.schedule interleaved_zero_bubble or zbv",
    ): """
        enable-zbh1-exact-semantics enable-zbh1-pipeline""",
    ("a run ends after training.steps", "set training.steps, or training.stop_after"): """
        exit-interval""",
    ("validation uses the batch of training", "leave it out"): """
        eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets start-eval-at-iter
        train-data-exact-num-epochs validation-set-names""",
}
"""(reason, remedy) -> arguments that cannot be taken, without which the training has the same numbers."""
