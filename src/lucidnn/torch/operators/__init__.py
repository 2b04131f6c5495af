"""What lucidnn does for the framework's operators, a file for each family; importing it fills `OVERRIDES`."""

from . import activation as activation
from . import convolution as convolution
from . import dropout as dropout
from . import normalization as normalization
from . import pooling as pooling
from . import resampling as resampling
from . import softmax as softmax
