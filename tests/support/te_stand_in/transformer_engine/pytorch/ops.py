"""Names of the operation fuser that Megatron's annotations contain; `use_te_op_fuser` is not supported."""


class FusibleOperation:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("the stand-in has no operation fuser")


class Sequential(FusibleOperation):
    pass
