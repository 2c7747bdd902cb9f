from given import *

steps = 201
for inputs, targets in batches:
    train_step(model, inputs, targets)
    optimizer.step()
