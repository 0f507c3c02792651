"""Parts that layers of all kinds share: linear layers, norms, packs, images, and forms of the residual."""
