"""The ground floor: formats of stores and studies on disk; reading, writing, sealing. No torch, no
statistics.
"""

from .attributes import Attributes as Attributes
from .attributes import ComputeFacts as ComputeFacts
from .attributes import CorpusFacts as CorpusFacts
from .attributes import ModelFacts as ModelFacts
from .attributes import NormFacts as NormFacts
from .attributes import PlanFacts as PlanFacts
from .attributes import StorageFacts as StorageFacts
from .attributes import TokenizerFacts as TokenizerFacts
from .attributes import parse_attributes as parse_attributes
from .dtypes import LAYER_SITES as LAYER_SITES
from .dtypes import SITES as SITES
from .dtypes import STORAGE_DTYPES as STORAGE_DTYPES
from .dtypes import array_name as array_name
from .dtypes import decode as decode
from .dtypes import encode as encode
from .dtypes import numpy_dtype as numpy_dtype
from .durable import check_space as check_space
from .durable import claim_folder as claim_folder
from .errors import DamageError as DamageError
from .errors import EnvironmentFault as EnvironmentFault
from .errors import FormatError as FormatError
from .errors import IncompleteError as IncompleteError
from .errors import MissingChunk as MissingChunk
from .errors import NearlineError as NearlineError
from .errors import NotFinite as NotFinite
from .errors import OutOfRange as OutOfRange
from .errors import ProofFailed as ProofFailed
from .errors import StoreNotFound as StoreNotFound
from .errors import StoreNotSealed as StoreNotSealed
from .errors import UsageError as UsageError
from .info import info as info
from .layout import choose_block as choose_block
from .layout import n_objects as n_objects
from .layout import store_bytes as store_bytes
from .open import open as open
from .plan import SPLITS as SPLITS
from .plan import Plan as Plan
from .progress import Progress as Progress
from .progress import silent as silent
from .reader import Reader as Reader
from .sealing import seal as seal
from .study import Study as Study
from .writer import StoreWriter as StoreWriter
