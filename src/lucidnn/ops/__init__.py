"""What each operation means: shapes, layouts, counts, and the mathematics in the docstrings. No kernels.

Importing the package registers every operation in `lucidnn.core.operation.Operation.registry`.
"""

import importlib
import pkgutil

for _info in pkgutil.iter_modules(__path__, __name__ + "."):
    importlib.import_module(_info.name)
