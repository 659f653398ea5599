"""nearline: harvest a language model's MLP inputs and outputs once; measure offline which MLPs are nearly
linear.

`nearline.collect` runs the model (torch); `nearline.store`, `nearline.analyze` and `nearline.reports` work
from the store and never load torch. Importing this package loads nothing.
"""

__version__ = "0.1.0"
