from .tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """No tensor is of this class."""
