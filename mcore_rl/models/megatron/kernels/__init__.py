"""Functions of tensors with hand-written backward passes: attention over packs, the gated delta rule."""
