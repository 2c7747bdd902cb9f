from given import *

steps = 0
