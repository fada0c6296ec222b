"""Layers whose products and norms ask for the next matrix while they end, beside those that do not."""
import json, os, subprocess, sys, time
from pathlib import Path
t0=time.time()
sys.path[:0]=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "torch-ext")]
JOBS=[("7B",M) for M in (16,8,32,64,48,24)]+[("32B",M) for M in (8,16,32,64)]
if len(sys.argv)==1:
    ps=[subprocess.Popen([sys.executable,__file__,"warm",m,str(M)],stdout=subprocess.DEVNULL,stderr=subprocess.STDOUT) for m,M in JOBS]
    timer=subprocess.Popen([sys.executable,__file__,"time"])  # waits for the file
    for p in ps: p.wait()
    print("compiled",round(time.time()-t0,1),[p.returncode for p in ps],flush=True)
    open("/tmp/go","w").close(); timer.wait(); sys.exit()
import torch
import every_size as e
from qerl_nvfp4 import select
def choose(N,K,M,rows):
    return select.with_adapter(N,K,M,rows) if False else None
prop=torch.cuda.get_device_properties(0)
l2=prop.L2_cache_size
import inspect
from qerl_nvfp4.select import choose as pick
def by_products(L,M,chosen):
    """As in a compiled engine: each product asks for the next one's bytes, norms ask for nothing."""
    x=torch.randn(M,L.hidden,device="cuda",dtype=torch.bfloat16)
    outs={n: torch.empty(M,N,device="cuda",dtype=torch.bfloat16) for n,(N,_) in L.shapes.items()}
    nxt={"qkv":("o",0),"o":("gate_up",0),"gate_up":("down",0),"down":("qkv",1)}
    def product(i,name,x):
        out=outs[name]; n,ahead=nxt[name]
        e.ops.product(chosen[name],x,*L.packed[i][name],L.gs,None,*L.adapters[i][name],L.splits.get(L.shapes[name]),out,L.packed[(i+ahead)%L.copies][n][0])
        return out
    import functools
    return lambda i: L.run(x,functools.partial(product,i),{})
def chosen_for(model,layers,M):
    splits=layers.splits
    return {n: pick(N,K,M,0,True,e.RANK,len(splits.get((N,K),(N,)))) for n,(N,K) in layers.shapes.items()}
if sys.argv[1]=="warm":
    model,M=sys.argv[2],int(sys.argv[3])
    e.timing.copies_needed=lambda *a: 1
    L=e.Layers(model,l2,"cuda"); c=chosen_for(model,L,M)
    for f in (False,True): L.call(M,c,f)(0)
    by_products(L,M,c)(0)
    torch.cuda.synchronize(); sys.exit()
Ls=e.Layers("7B",l2,"cuda")
print("built",round(time.time()-t0,1),prop.name,flush=True)
while not os.path.exists("/tmp/go"): time.sleep(.1)
cur="7B"
for m,M in JOBS:
    if m!=cur: Ls=None; torch.cuda.empty_cache(); Ls=e.Layers(m,l2,"cuda"); cur=m
    c=chosen_for(m,Ls,M)
    us=e.times_us([Ls.call(M,c),Ls.call(M,None),Ls.call(M,{}),Ls.call(M,c,True),by_products(Ls,M,c)],Ls.copies,3,4)
    print(json.dumps({"model":m,"M":M,**dict(zip(("ours","bf16","glue","fetched","by_products"),[round(u,2) for u in us])),"t":round(time.time()-t0,1)}),flush=True)
