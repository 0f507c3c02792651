"""Functions of tensors with their own backward passes: attention over packs or chosen keys, the gated delta rule."""
