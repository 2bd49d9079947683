"""Arguments of Megatron-LM and Megatron-DeepSpeed that change nothing here, and those that cannot be taken.

Names are written without the two hyphens, as in arguments.py of Megatron-LM (core 0.8 to 0.19 and 23.04) and of
Megatron-DeepSpeed.
"""

IDLE = {
    "megalite reports every step itself (metrics.jsonl; monitor.tensorboard)": """
        log-params-norm log-throughput log-progress log-num-zeros-in-grad log-timers-to-tensorboard
        log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
        log-world-size-to-tensorboard log-optimizer-states-to-tensorboard log-learning-rate-to-tensorboard
        log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard
        no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard log-memory-interval
        log-device-memory-used log-l2-norm-grad-to-tensorboard log-max-attention-logit log-energy log-straggler
        log-throughput-to-tensorboard log-runtime-to-tensorboard throughput-window-size runtime-time-unit
        tensorboard-log-interval tensorboard-queue-size timing-log-level timing-log-option
        no-barrier-with-level-1-timing wandb-project wandb-exp-name wandb-save-dir wandb-entity logging-level
        no-filter-warnings disable-filter-warnings modules-to-filter set-level-for-all-loggers save-config-filepath
        memory-keys straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup no-one-logger
        one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version
        config-logger-dir run-workload-inspector-server one-logger-entity enable-one-logger
        tensorboard-log-interval codecarbon-dir""",
    "it profiles; megalite has megalite doctor and metrics.jsonl": """
        profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history
        memory-snapshot-path record-shapes nvtx-ranges profile-steps profile-backward use-nsys-profiler
        pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra""",
    "megalite has its own operators and chooses them itself (model.kernels)": """
        transformer-impl attention-backend use-flash-attn use-flash-attn-v2 use-flash-attn-triton
        use-flash-attn-builder no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
        no-persist-layer-norm no-gradient-accumulation-fusion use-mcore-models use-legacy-models
        cross-entropy-loss-fusion cross-entropy-fusion-impl apply-rope-fusion fused-residual-rmsnorm
        fused-single-qkv-rope bias-activation-fusion bias-dropout-fusion gradient-accumulation-fusion
        masked-softmax-fusion persist-layer-norm memory-efficient-layer-norm disable-mem-efficient-ln
        use-te-activation-func use-transformer-engine-op-fuser use-fused-rmsnorm no-use-fused-rmsnorm
        flash-attention-version flash-decode attention-softmax-in-fp32 no-attention-softmax-in-fp32
        disable-attention-softmax-in-fp32 apply-query-key-layer-scaling no-query-key-layer-scaling
        use-grouped-gemm-for-dense-mlp enable-cuda-graph external-cuda-graph cuda-graph-impl cuda-graph-scope
        cuda-graph-modules cuda-graph-warmup-steps cuda-graph-retain-backward-graph optimizer-cuda-graph
        no-cuda-graph-use-single-mempool disable-cuda-graph-use-single-mempool disable-jit-fuser
        te-rng-tracker use-te-rng-tracker deterministic-mode batch-invariant-mode batch-invariant-backend
        enable-experimental ds-fused-adam cpu-torch-adam disable-bf16-reduced-precision-matmul torch-compile
        use-fused-weighted-squared-relu bf16-reduced-precision-matmul use-torch-optimizer-for-cpu-offload
        no-bias-geglu-fusion onnx-safe softmax-scale-in-fp32 use-kitchen use-kitchen-attention
        kitchen-config-file kitchen-recipe-number no-check-for-nan-in-loss disable-check-for-nan-in-loss
        no-check-for-nan-in-loss-and-grad check-for-large-grads check-for-spiky-loss check-for-nan-in-loss-and-grad
        gpu-sniff-test-interval check-weight-hash-across-dp-replicas-interval""",
    "megalite overlaps and buckets communication itself": """
        overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step no-align-param-gather
        align-param-gather no-align-grad-reduce disable-align-grad-reduce delay-grad-reduce ddp-num-buckets
        ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective
        ddp-reduce-scatter-with-fp32-accumulation no-overlap-p2p-communication overlap-p2p-communication
        overlap-p2p-communication-warmup-flush overlap-p2p-comm defer-embedding-wgrad-compute wgrad-deferral-limit
        delay-wgrad-compute no-async-tensor-model-parallel-allreduce async-tensor-model-parallel-allreduce
        no-scatter-gather-tensors-in-pipeline no-contiguous-buffers-in-local-ddp ddp-impl use-nccl-ub
        disable-symmetric-registration create-all-gather-group use-ring-exchange-p2p barrier-with-l1-time
        num-distributed-optimizer-instances suggested-communication-unit-size keep-fp8-transpose-cache
        no-gradient-reduce-div-fusion deallocate-pipeline-outputs batch-p2p-comm no-batch-p2p-comm
        disable-batch-p2p-comm no-batch-p2p-sync disable-batch-p2p-sync variable-seq-lengths
        microbatch-group-size-per-virtual-pipeline-stage microbatch-group-size-per-vp-stage
        no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding
        distribute-saved-activations distribute-checkpointed-activations symmetric-ar-type
        gradient-reduce-div-fusion fsdp-double-buffer fsdp-manual-registration outer-dp-sharding-strategy
        enable-full-sharding-in-hsdp no-use-layer-wise-param-layout torch-fsdp2-no-reshard-after-forward
        bucket-size local-ddp reuse-grad-buf-for-mxfp8-param-ag high-priority-stream-groups use-sharp
        sharp-enabled-group nccl-communicator-config-path use-tp-pp-dp-mapping pipeline-model-parallel-comm-backend
        cp-comm-type hierarchical-context-parallel-sizes nccl-ub fake-process-group check-param-hashes
        ddp-param-name-patterns-for-fp32-local-accumulation zero-reduce-scatter zero-contigious-gradients
        zero-reduce-bucket-size zero-allgather-bucket-size high-priority-a2a-comm-stream""",
    "the launcher and the process groups are megalite's (megalite launch, [launch])": """
        distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init local-rank lazy-mpu-init
        use-cpu-initialization disable-gloo-process-groups enable-gloo-process-groups use-gloo-process-groups
        flight-recorder-dump-path flight-recorder-trace-buffer-size flight-recorder-include-stack-trace
        no-flight-recorder-dump-on-timeout disable-flight-recorder-dump-on-timeout
        no-flight-recorder-include-only-active disable-flight-recorder-include-only-active
        no-flight-recorder-extra-dump-on-exec disable-flight-recorder-extra-dump-on-exec adlr-autoresume
        adlr-autoresume-interval enable-ft-package calc-ft-timeouts ft-num-warmup-iters inprocess-restart
        exit-signal-handler exit-signal exit-signal-handler-for-dataloader exit-signal-handler-for-training
        kill-switch-file rerun-mode error-injection-rate error-injection-type result-rejected-tracker-filename
        test-mode otel-enabled otel-service-name otel-span-groups manual-gc manual-gc-interval no-manual-gc-eval
        disable-manual-gc-eval train-sync-interval empty-unused-memory-level no-initialization""",
    "checkpoints are megalite's own; megalite convert import reads theirs": """
        ckpt-format dist-ckpt-format use-dist-ckpt dist-ckpt-workers ckpt-fully-parallel-save ckpt-fully-parallel-load
        no-ckpt-fully-parallel-save ckpt-assume-constant-structure dist-ckpt-strictness auto-detect-ckpt-format
        async-save async-strategy async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm
        async-ckpt-use-cached-structure use-persistent-ckpt-worker non-persistent-save-interval
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
        non-persistent-local-ckpt-algo replication replication-jump replication-factor ckpt-convert-format
        ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format exit-on-missing-checkpoint no-save-rng
        no-load-rng load-optim save-optim load-rng save-rng disable-save-rng disable-load-rng no-save-optim
        disable-save-optim use-checkpoint-args use-mp-args-from-checkpoint-args
        no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path no-ckpt-load-validate-sharding-integrity
        disable-ckpt-load-validate-sharding-integrity no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load
        dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        no-save-tokenizer-assets disable-save-tokenizer-assets verify-integrity universal-checkpoint load-tag
        ckpt-drop-redundant-extra-state hetereogenous-dist-checkpoint enable-msc disable-msc save-retain-interval
        most-recent-k persistent-save-interval no-pin-cpu-grads no-pin-cpu-params use-precision-aware-optimizer
        save-activations-interval save-dgrads-interval save-params-interval save-wgrads-interval ckpt-step
        override-ckpt-iteration no-load-optim disable-load-optim no-load-lr-state reset-iteration
        override-opt-param-scheduler use-checkpoint-opt-param-scheduler
        dump-param-to-param-group-map""",
    "megalite reads and caches the data itself": """
        data-impl mmap-warmup data-cache-path no-mmap-bin-files num-workers num-dataset-builder-threads
        no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap mid-level-dataset-surplus object-storage-cache-path s3-cache-path
        allow-ambiguous-pad-tokens use-dataset-only return-data-index aml-data-download-path
        test-data-path repeated-dataloader per-dataset-sequences-path
        tokenizer-hf-no-use-fast tokenizer-metadata use-gigatoken tiktoken-pattern tiktoken-num-special-tokens
        tokenizer-sentencepiece-legacy no-tokenizer-sentencepiece-ignore-extra-whitespaces
        disable-tokenizer-sentencepiece-ignore-extra-whitespaces trust-remote-code null-tokenizer-eod-id
        null-tokenizer-pad-id""",
    "it chooses how memory is used; the numbers stay the same (training.recompute)": """
        deepspeed-activation-checkpointing partition-activations contigious-checkpointing checkpoint-in-cpu
        synchronize-each-layer fine-grained-activation-offloading offload-modules cpu-offloading
        cpu-offloading-num-layers cpu-offloading-weights no-cpu-offloading-activations
        disable-cpu-offloading-activations cpu-offloading-double-buffering activation-offload-fraction
        cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks
        fine-grained-offloading-max-inflight-offloads num-microbatches-with-partial-activation-checkpoints
        use-pin-memory remote-device scattered-embeddings split-transformers memory-centric-tiled-linear tile-factor
        overlap-cpu-optimizer-d2h-h2d optimizer-offload-fraction recompute-modules ep-overlap-early-attn-memory-release
        checkpoint-num-layers dataloader-type""",
    "the models of this script have none of it": """
        bert-no-binary-head bert-load mask-prob short-seq-prob vocab-extra-ids sample-rate use-one-sent-docs
        relative-attention-num-buckets relative-attention-max-distance output-bert-embeddings bert-embedder-type
        encoder-seq-length decoder-seq-length retriever-seq-length embedding-path block-data-path evidence-data-path
        titles-data-path query-in-block-prob num-classes img-h img-w num-channels patch-dim classes-fraction
        data-per-class-fraction no-data-sharding head-lr-mult vision-pretraining vision-pretraining-type
        vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch biencoder-projection-dim
        biencoder-shared-query-context-model indexer-batch-size indexer-log-interval max-tokens-to-oom
        num-experts-teacher num-layers-teacher hidden-size-teacher num-attention-heads-teacher load-teacher
        kd-alpha-ce kd-beta-ce kd-temp mlp-type topk expert-interval moe-loss-coeff moe-min-capacity
        moe-train-capacity-factor moe-eval-capacity-factor create-moe-param-group disable-moe-token-dropping
        disable-moe-top2-2nd-expert-sampling enable-expert-tensor-parallelism use-tutel num-experts-switch
        moe-expert-parallel-size expert-model-parallel-size expert-tensor-parallel-size mscale mscale-all-dim
        rotary-scaling-factor kv-lora-rank q-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim cache-mla-latents
        mla-down-proj-fusion mrope-section ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading
        force-ds-sequence-parallel fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix
        fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token train-idx-path
        train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path use-fused-mla
        muon-momentum muon-no-split-qkv muon-nesterov muon-use-nesterov muon-scale-mode muon-fp32-matmul-prec
        muon-coefficient-type muon-num-ns-steps muon-tp-mode muon-use-syrk muon-extra-scale-factor
        muon-scalar-optimizer sft-tokenizer-prompt-format glu-linear-offset overlap-moe-expert-parallel-comm
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 hybrid-attention-ratio hybrid-mlp-ratio
        nccl-all-reduce-for-prefill decode-only-cuda-graphs enable-chunked-prefill num-speculative-tokens
        use-same-sampling-seed-across-dp-ranks use-legacy-static-engine use-inference-optimized-layers
        megatron-fsdp-version ds-inference inference-rng-tracker softmax-type-learnable""",
}
"""Reason -> arguments without effect here."""

IDLE_PREFIXES = {
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
        num-experts num-moe-experts moe-use-upcycling mos""",
    ("megalite does not build this kind of model", "choose a decoder of megalite's families"): """
        multi-latent-attention experimental-attention-variant linear-attention-freq is-hybrid-model
        hybrid-layer-pattern hybrid-override-pattern heterogeneous-layers-config-path
        heterogeneous-layers-config-encoded-json heterogeneous-block-specs enable-mhc-connections mtp-num-layers
        retro-add-retriever encoder-num-layers decoder-num-layers spec embed-layernorm glu-activation
        attention-output-gate apply-residual-connection-post-layernorm quick-geglu squared-relu rotary-interleaved
        no-rope-freq qk-l2-norm window-attn-skip-freq use-mup mimo activation-func-clamp-value
        enable-hyper-connections""",
    ("megalite computes in bf16, fp16 or fp32", "set training.precision"): """
        fp8-format fp8-e4m3 fp8-hybrid fp4-format first-last-layers-bf16 fp8-param-gather fp4-param-gather
        te-precision-config-file main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
        embedding-weights-in-fp32 fp32-residual-connection fp16-lm-cross-entropy output-logit-dtype
        enable-autocast params-dtype""",
    ("megalite trains on the next token alone", "leave it out"): """
        perform-rl-step sft fim-data kd logits-load-dir random-ltd data-efficiency-curriculum-learning
        freeze-all-layers qk-clip no-save-gradients""",
    ("the batch size stays the same during a run", "set training.global_batch_size"): """
        rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed""",
    (
        "the parameters have one learning rate and weight decay",
        "write [[optimizer.groups]] with patterns",
    ): """
        decoupled-lr decoupled-min-lr no-weight-decay-cond-type apply-wd-to-qk-layernorm""",
    ("megalite draws initial values as --init-method-std says", "leave it out"): """
        init-method-xavier-uniform embedding-init-method-std data-parallel-random-init""",
    ("megalite masks no single tokens in packed text", "leave it out, or set data.document_mask"): """
        eod-mask-loss""",
    ("steps are never skipped on purpose", "leave it out"): "iterations-to-skip",
    ("the arguments stand in another file", "name that file's arguments in the script"): """
        yaml-cfg data-args-path per-split-data-args-path phase-transition-iterations""",
    ("the text is made up", "set data.source"): "mock-data",
    (
        "it is an older argument that Megatron-LM refuses too",
        "use today's name",
    ): "batch-size warmup model-parallel-size",
    ("it only measures a trained model", "use megalite evaluate"): "skip-train inference",
}
"""(reason, remedy) -> arguments that would change the numbers."""

REFUSED_LAYOUT = {
    ("megalite has no context parallelism", "use parallel.tensor with parallel.sequence"): """
        context-parallel-size ds-sequence-parallel-size ds-sequence-parallel-fpdt hybrid-context-parallel""",
    ("the layers of a stage are written as a list", "set parallel.layers_per_stage"): """
        pipeline-model-parallel-layout account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
        standalone-embedding-stage pipeline-model-parallel-split-rank
        virtual-pipeline-model-parallel-size""",
    ("megalite shards by ZeRO", "set deepspeed.zero_optimization.stage 3"): """
        use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy""",
    (
        "optimizer states are offloaded by DeepSpeed",
        "set deepspeed.zero_optimization.offload_optimizer.device cpu",
    ): """
        optimizer-cpu-offload cpu-optimizer""",
    (
        "megalite has zero-bubble schedules of its own",
        "set parallel.schedule interleaved_zero_bubble or zbv",
    ): """
        enable-zbh1-pipeline enable-zbh1-exact-semantics""",
    ("a run ends after training.steps", "set training.steps, or training.stop_after"): "exit-interval",
    ("validation uses the batch of training", "leave it out"): """
        eval-global-batch-size eval-micro-batch-size start-eval-at-iter full-validation multiple-validation-sets
        validation-set-names train-data-exact-num-epochs""",
}
"""(reason, remedy) -> arguments that cannot be taken, without which the training has the same numbers."""
