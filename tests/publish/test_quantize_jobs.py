import threading
import time

from qerl_trl.publish import quantize


def test_bytes_in_work_stay_within_the_budget():
    budget = quantize.Budget(100)
    budget.acquire(80)
    done = []
    thread = threading.Thread(target=lambda: (budget.acquire(30), done.append(True)))
    thread.start()
    time.sleep(0.05)
    assert not done
    budget.release(80)
    thread.join(2)
    assert done
    budget.release(30)
    budget.acquire(500)  # larger than the budget, alone: allowed
