"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1), trained with its heads written out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.attention import SelfAttention
from megalite.model.context import StepContext
from megalite.model.dropout import LayerMasks
from megalite.model.kv_cache import CachedStep, PromptSegment
from megalite.model.norms import Norm
from megalite.model.options import ModelOptions
from megalite.ops.attention_form import AttentionForm
from megalite.ops.decode_attention import decode_attention
from megalite.ops.rotary import Rotation
from megalite.parallel.collectives import column_input
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.lora_bank import Selection
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape

# Both of transformers' classes fix it, whatever rms_norm_eps of config.json says.
_EPS = 1e-6


class LatentSelfAttention(SelfAttention):
    """Self-attention whose keys and values come from one low-rank vector a token, and one rotated key for all heads.

    The vectors are whole on every rank of tp, each for its own positions with sequence parallelism, so that only they
    are gathered; the heads made of them are split. Values are padded with zeros to the keys' width, which all kernels
    want. Rotated values are interleaved pairs, as in DeepSeek's files.
    """

    def add_projections(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> None:
        assert isinstance(shape, MixtureShape) and shape.latent is not None
        latent, self.mesh = shape.latent, mesh
        hidden, heads, nope = shape.hidden_size, self.heads, latent.qk_nope_head_dim
        self.key_parts = (nope, latent.qk_rope_head_dim)
        self.value_parts = (nope, latent.v_head_dim)
        self.latent_parts = (latent.kv_lora_rank, latent.qk_rope_head_dim)
        alone = ParallelMesh.single(mesh.device)

        def down(outputs: int) -> ColumnParallelLinear:
            return self._column(hidden, outputs, alone, options, bias=shape.attention_bias)

        self.q_proj: ColumnParallelLinear | None = None
        if latent.q_lora_rank is None:
            self.q_proj = self._column(hidden, heads * latent.qk_head_dim, mesh, options)
        else:
            self.q_a_proj = down(latent.q_lora_rank)
            self.q_a_layernorm = Norm(latent.q_lora_rank, _EPS, options)
            self.q_b_proj = self._column(latent.q_lora_rank, heads * latent.qk_head_dim, mesh, options)
        self.kv_a_proj_with_mqa = down(sum(self.latent_parts))
        self.kv_a_layernorm = Norm(latent.kv_lora_rank, _EPS, options)
        self.kv_b_proj = self._column(latent.kv_lora_rank, heads * sum(self.value_parts), mesh, options)
        self.o_proj = RowParallelLinear(
            heads * latent.v_head_dim,
            hidden,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_output_bias,
            gradients=options.weight_gradients,
        )

    def _column(
        self, inputs: int, outputs: int, mesh: ParallelMesh, options: ModelOptions, *, bias: bool = False
    ) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            mesh=mesh,
            dtype=options.dtype,
            bias=bias,
            gradients=options.weight_gradients,
        )

    @property
    def compresses(self) -> bool:
        """Whether a cache may hold vectors: keys and values follow from them by one matrix, the same for all tokens."""
        linear = self.kv_b_proj
        return isinstance(linear, ColumnParallelLinear) and linear.lora is None and linear.bank is None

    def project(
        self, hidden_states: Tensor, rotation: Rotation | None, context: StepContext, masks: LayerMasks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of SelfAttention; for a compressed cache the vectors [1, T, 1, width] in place of keys and values."""
        adapters = context.adapters
        if self.q_proj is not None:
            query = self.q_proj(hidden_states, None, adapters)
        else:
            compressed = self.q_a_layernorm(self.q_a_proj(hidden_states, None, adapters))
            query = self.q_b_proj(compressed, None, adapters)
        query = query.unflatten(-1, (self.heads, -1))
        vectors = self.kv_a_proj_with_mqa(hidden_states, None, adapters)
        compressed, rotating = vectors.split(self.latent_parts, dim=-1)
        compressed = self.kv_a_layernorm(compressed)
        # Each rank's heads use the one rotated key, so that its gradient is the sum over tp.
        shared = column_input(rotating, self.mesh).unsqueeze(2)
        if rotation is not None:
            unrotated, turning = query.split(self.key_parts, dim=-1)
            turning, shared = self.rotary.rotate(turning, shared, rotation._replace(interleaved=True))
            query = torch.cat((unrotated, turning), dim=-1)
        if context.cache is not None and context.cache.cache.compressed:
            vectors = torch.cat((compressed.unsqueeze(2), shared), dim=-1)
            return query, vectors, vectors
        return query, *self._expanded(compressed, shared, adapters)

    def _expanded(
        self, compressed: Tensor, shared: Tensor, adapters: Selection | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of this rank's heads from latent vectors [B, S, C] and rotated keys [B, S, 1, R]."""
        both = self.kv_b_proj(compressed, None, adapters)
        key, value = both.unflatten(-1, (self.heads, -1)).split(self.value_parts, dim=-1)
        key = torch.cat((key, shared.expand(-1, -1, self.heads, -1)), dim=-1)
        return key, F.pad(value, (0, key.shape[-1] - value.shape[-1]))

    def attend_decoded(
        self, step: CachedStep, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """As of CachedStep. Over vectors all heads attend to the same ones (section 2.1.2): a query takes the place of
        its product with the keys' matrix, and the values' matrix multiplies what is attended to."""
        if not step.cache.compressed:
            return super().attend_decoded(step, form, query, key, value)
        cached = step.extend_vectors(self.layer, key, form.window)
        for_keys, for_values = self.matrices()
        unrotated, turning = query.split(self.key_parts, dim=-1)
        absorbed = torch.cat((torch.einsum("nhd,hdc->nhc", unrotated, for_keys), turning), dim=-1)
        latents = decode_attention(
            absorbed,
            cached,
            cached[..., : self.latent_parts[0]],
            step.visible(form.window).bias,
            form._replace(scale=form.factor(self.head_dim)),
        )
        attended = torch.einsum("nhc,hdc->nhd", latents, for_values)
        return F.pad(attended, (0, self.head_dim - attended.shape[-1]))

    def extend_segment(
        self, step: CachedStep, segment: PromptSegment, key: Tensor, value: Tensor, prefix: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not step.cache.compressed:
            return super().extend_segment(step, segment, key, value, prefix)
        vectors = step.extend_vectors_of_segment(self.layer, segment, key)
        compressed, shared = vectors.split(self.latent_parts, dim=-1)
        return self._expanded(compressed, shared.unsqueeze(2))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return this rank's part of kv_b_proj, which makes keys and which makes values: [heads, width, C] each."""
        if not self.compresses:
            raise AssertionError("a compressed cache beside adapters or int8 weights of kv_b_proj")
        by_head = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        for_keys, for_values = by_head.split(self.value_parts, dim=1)
        return for_keys, for_values

    def joined(self, attended: Tensor) -> Tensor:
        return attended[..., : self.value_parts[1]].flatten(2)
