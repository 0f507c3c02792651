"""Layers with a recurrent state in the place of attention: gated delta nets and Mamba-2."""
