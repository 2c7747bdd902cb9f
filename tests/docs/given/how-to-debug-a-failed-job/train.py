import smpkit.torch as smp


def build():
    if smp.rank() == 2:
        raise ValueError("hidden size 2050 is not divisible by 4")


smp.init()
build()
smp.barrier()
