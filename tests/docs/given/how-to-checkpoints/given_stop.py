from given_trained import *

steps = 0
