"""What tests ask of lengths."""

from controller.mirror.lengths import TierLengths


def predicted(lengths: TierLengths, tier: str, emitted_tokens: int, cap_tokens: int, tenant: str = "") -> int:
    """The length that a tier's history tells, without its bound."""
    return lengths.estimate(tier, emitted_tokens, cap_tokens, tenant, 0.9)[0]
