"""The prose of docs/performance.md, section by section; performance.py puts figures and tables to it."""

TITLE = "# Performance\n"

GAINS = """\
Find your task; each paragraph ends with the chapter that has its record. FP8 means block, current and delayed scaling, speeds
are those of training steps, and a range is over these recipes.

**I train an 8B model on H100s or H200s.** Four layers of Llama 3 8B, converted by `fuse_`, with AdamW and two sequences of 4096
tokens on one H200: in FP8 {llama_called} times the speed of bf16, {llama_called_over_compiled} times that of bf16 under
torch.compile. Converted and then compiled: {llama_compiled} and {llama_compiled_over_compiled} times. On an H100 a decoder of
four layers as wide, with {decoder_tokens} tokens, has {decoder_h100} times the speed of bf16 without torch.compile; on the H200
{decoder_h200}. Under FSDP2 on {ranks} H200, with weights stored in FP8, a step has {fsdp_speed} times the speed of torch's in
bf16, and gathers {fsdp_bytes} of the bytes. Compiled, under current and block scaling, a step has {tokens_4096} times the speed
of bf16 with 4096 tokens and {tokens_16384} with 16384, and {torchao_16384} times that of torchao. With few tokens the CPU
decides ({tokens_512} with 512): as one CUDA graph (`opfuse.graphed_step`) a step has {graph_512} times the speed of compiled
bf16 with 512 tokens, {graph_1024} with 1024 and {graph_2048} with 2048, which is {graphs_512} and {graphs_2048} times that of
bf16 as a graph with 512 and 2048. A whole step of all 32 layers on one H200, 8192 tokens, with torchao's moments in 8 bits:
{whole} times the speed of bf16, and {whole_graph} as one CUDA graph, which is {whole_graphs} times that of bf16 as a graph. Not
measured: more than {ranks} GPUs. A 1.1 B Llama was [trained for 8 M tokens](#a-11-b-llama).
[Llama](#llama-converted-with-fuse_), [beside torchao](#llama-beside-torchao), [whole steps](#whole-training-steps), [CPU
time](#cpu-time), [several GPUs](#several-gpus).

**I fine-tune on an RTX 4090.** Nothing was measured: no GPU of compute capability 8.9 was at hand. FP8 with one scale per
tensor or row is native there, and compared with exact products on first use; blocks, MXFP8 and NVFP4 are emulated.
`opfuse doctor --certify` times FP8 products beside bf16 on your GPU. On an H200, LoRA over four layers stored in FP8 takes half
the memory of weights in bf16; a step has 1.2 to 1.3 times the speed with 8192 tokens, about the same with 4096. All layers in
checkpoints, with 4096 tokens, have {lora_called} times the speed called and {lora_compiled} compiled, since the CPU decides, and
{lora_graph} as a CUDA graph ([adapters](#adapters-over-stored-weights)).

**I have small layers.** At hidden size 256 the CPU decides: a step takes {small} times as long as eager bf16, without a
recipe or in FP8. As a CUDA graph (`opfuse.graphed`) a step in FP8 takes {small_graphed} times as long as called.
`opfuse.advise(model)` says which layers are large enough. [CPU time](#cpu-time), [CUDA
graphs](#cuda-graphs-torchcompile-offload).

**I train a mixture of experts.** Two layers, each compiled, over the same in bf16, under current and block scaling:
{mixtral_compiled} times the speed for Mixtral's few large experts (16384 tokens); {qwen_compiled} for the 128 small ones of
Qwen3-30B-A3B with as many tokens, and {qwen_few_compiled} with 8192, where the CPU decides. As one CUDA graph
(`opfuse.graphed_step`) they have {mixtral_compiled_as_a_graph}, {qwen_compiled_as_a_graph} and {qwen_few_compiled_as_a_graph}
times the speed. Compile the layers: called, they have {mixtral_called}, {qwen_called} and {qwen_few_called}.
With experts spread over {ranks} GPUs, a layer has {spread_mixtral} times the speed of torch's in bf16 for Mixtral's shape and
{spread_qwen} for Qwen3's. [Mixtures](#mixtures-converted-with-fuse_), [several GPUs](#several-gpus).

**I use torch.compile.** Compiling the converted Llama layers above saves {compiling_saves} % of their step. Two decoder
layers of ops are one graph for all recipes, with {breaks} graph breaks and {recompilations} recompilations; its first call
takes {first_compiled} s. [Llama](#llama-converted-with-fuse_), [torch.compile](#cuda-graphs-torchcompile-offload).

**Memory is short.** Four decoder layers (8192 tokens, current and block scaling) save {saved_kept} % of what bf16 saves for the
backward pass, with a peak of {peak_kept} %; with `keep="recompute"` {saved_recomputed} %, with a peak of {peak_recomputed} %.
Parameters and optimizer states are as in bf16. [Memory](#memory). A whole step of a 1.1 B Llama as one CUDA graph, with a fused
loss, the head in FP8, delayed scaling and moments in 8 bits, takes {small_peak} % of the peak of compiled bf16 with fp32
masters, at {small_speed} times its speed (32 768 words; {large_peak} % and {large_speed} with 128 256). [Whole
steps](#whole-training-steps).

**I want MXFP8 or NVFP4.** The GPUs of these records emulate both: a step takes {emulated} times as long as in bf16. They are
native from compute capability 10.0 on, where nothing was measured.
[Pipelines](#pipelines-compared-with-their-products-8192-tokens-4096-wide-14336-inside).
"""

HEAD = """\
Measured on {device} by `{script}`, with {versions}.

- Every table is measured in one process, on random data. Each section gives its date, and digests of the kernels' sources (as
  `opfuse kernels --digest` prints) and of the package. *These sources*, those of the day on which this page was written, have
  `{today}`.
- A figure in parentheses is the limit that the project sets itself. A figure that misses its limit is **bold**.
- Bandwidths count the fewest bytes that a kernel can move.
- Two pipelines come up again and again, with inputs and weights in bf16. **A** is Linear, GELU, Linear, with biases. **B** is
  RMSNorm, Linear to twice the inner width, SwiGLU, Linear, without biases; [ops.md](ops.md#speed) shows its training step.
- Recipes go by their kind: `delayed` is DelayedScaling, `fp8_current` Float8CurrentScaling, `fp8_block` Float8BlockScaling,
  `mxfp8` and `nvfp4` the emulated formats, `none` opfuse without a recipe.
- *Product* means matrix product (GEMM): fprop of the forward pass, dgrad and wgrad of the backward pass.

{code}. tests/gpu: {tests}.
"""

KERNELS = """\
Speed of the casts, elementwise chains and norms. 100 % of copy is the bandwidth of torch's copy of a bf16 matrix of that
shape.

- `row`, `col`, `both`: the cast writes data quantized along rows, along columns, or both.
- `delayed`, and `cast` after an activation: FP8 under a known scale. `current`: the amax is found first. `measured`: the same
  for NVFP4, in contrast to `known amax`. `blocks`: 1x128.
- `swizzled`, `swz`: scales in the order in which hardware with such products reads them.
- `decode`: back to bf16. `kept`: the input of the activation is also written, for the backward pass. `d`: a derivative.

"""

PEERS = "How many times as long PyTorch takes for the same result.\n\n"

PRODUCTS = """\
TFLOP/s, and in parentheses the speed relative to bf16, of operands that are already cast, with a result in bf16. fprop uses
the FP8 units' fast accumulation, dgrad and wgrad promote partial sums to fp32 (`split_accumulator`). MXFP8 and NVFP4 are
emulated. Each is timed by itself, for a few milliseconds; in the next section products run back to back for longer, and the
chip's power limits the same product to a lower speed.

"""

OWN = """\
Columns are problem sizes: rows x length of each sum x columns. A cell has the time or speed of opfuse's kernel, and how many
times as fast it is as what follows the `x`; the limit is a minimum. The two kernels take turns back to back, at the chip's power
limit. Where a figure says so, a kernel was timed *cool*, four launches after a pause of 80 ms, or *alone*, the last two thirds
of 0.9 s in which nothing else ran.

"""

TWICE = """\
*Experts* are groups whose sizes the GPU alone knows, which cuBLASLt does not take. They are beside torch's grouped product in
bf16, and DeepGEMM's of masked groups, all as CUDA graphs
([lines that are not there](decisions/lines-that-are-not-there.md)).

The product 1x128 by 1x128 is slower than 1x128 by 128x128, in cuBLASLt too: after every 128 products it multiplies the
partial sum by one scale, and then adds it, times the other scale, by an fma, where the other product needs the fma alone.
Without that multiplication the same kernel reached 1185 to 1269 TFLOP/s on an H200, in place of 923 to 1006. What was tried:

- tiles of 128x128, in which one consumer adds while the matrix unit computes its next sums: 0.95 to 1.02 times the speed;
- reading no scales of columns: 7 to 9 % faster;
- one barrier arrival for each warp in place of one for each thread: nothing;
- what [scales-before-products](decisions/scales-before-products.md) tells of both products.

DeepGEMM 2.6.1 is ahead. Of single products 1x128 by 128x128 the own kernel has 0.94 to 0.96 times its speed, in turns and
alone; of 128 experts with 16, 64 and 128 rows 0.91, 0.91 and 0.92, with 192 rows 1.24, since DeepGEMM's tiles hold 128 rows of
one expert whole. Products of a weight's gradient, added to fp32, have 0.96 to 1.04 times its speed. Where others miss their
limit, it is by little more than two records of one kernel differ: fast sums per tensor alone, and per row, for which cuBLASLt
makes single products, so that a call does not pay. Why they stay behind is not known. What was tried:

- [pairs of blocks](decisions/pairs-of-blocks.md), each of which loads half of an operand for both;
- reading the scales of rows before a consumer's turn in place of after it: nothing."""

CHAINED = """\
A product with the elementwise ops that follow it and the cast of the result, in one kernel; *apart* is one kernel after the
other.

"""

CHOICES = """\
opfuse chooses by size between its own product and cuBLASLt's (`FASTER`, and `ADDED` for sums that are added to a gradient in
fp32), and between a product with its chain in one launch and two launches (`CHEAPER`). Each figure is the speed of the package's
own way, relative to the alternative, on one side of a threshold; where it has a limit, the package's own way was chosen.

"""

PIPELINES = """\
`x products`: the GPU's time for the pipeline, relative to its matrix products alone; both take turns in one process. Forward
products are in the recipe's format, backward products too, or in bf16 under an override. *forward* is inference; *training*
is one forward and backward pass; *wall* is what a user waits for one. A training step under `delayed` moves the scales of the
weights, so it keeps none of their casts.

"""

BYTES_OF_A = (
    "What a pipeline adds to its products is memory traffic. In a training step of A under `fp8_current` and `dequantized`, "
    "in GB: "
)

BYTES_OF_B = """\
The same for B. In inference: the norm and SwiGLU, each with a cast, and the casts of weights unless they are kept. In
training: all casts, rowwise and columnwise, the derivatives of SwiGLU and of the norm, and the cast of the gradient. At the
speed of copy that takes, relative to the products:

"""

LESS_THAN_BYTES = """\
A measured training step can be a little faster than that: products that alternate with memory-bound kernels have more
electrical power available than products back to back. Running SwiGLU inside its product would save inference two thirds of
these bytes, but was slower; so was, in training, dgrad with the derivative and the cast behind it, 1.00 to 1.15 times as long:
[derivatives beside products](decisions/derivatives-beside-products.md)."""

PROFILES = """\
Milliseconds of the GPU for each kernel of a step, and in parentheses its launches, by torch.profiler. *nvjet* kernels are
cuBLASLt's, `product` and `product_chain` opfuse's own products.

"""

INVARIANCE = """\
Time with `batch_invariant=True`, relative to the same call without. Limits are for many tokens and native products; few tokens
and emulated products cost more, for these reasons:

- Of few tiles the library parts the sums among blocks, which is faster, and which no invariant product can do: the second layer
  under `fp8_block` with 512 tokens, and all layers under `delayed` with one.
- Emulated products are made in tiles of 1024 rows, whole ones: with 512 tokens half of the rows are zeros. With 8192 tokens the
  rows of each tile are copied first, and its result into that of all.

"""

GROUPED = """\
Columns are groups x rows of each; a layer has 7168 features in and 2048 out, unless the column says otherwise. *device
splits*: the sizes of groups are on the GPU, and one tensor has all weights. MXFP8 and NVFP4 are emulated and measured at the
smallest size alone.

"""

EXPERTS = """\
**Why blocks miss their limits.** A trace of single steps ([above](#where-the-time-of-these-steps-goes)), with device splits, has
{some:.1f} ms of kernels for 8 x 8192, where torch's bf16 layers have {some_bf16:.1f}: {some_speed:.2f} times the speed.
{some_products:.1f} of the {some:.1f} are products, as fast as cuBLASLt's for blocks, of which one has two 1x128 operands, the
slower kind; the rest are casts, at about the speed of copy. One step after another, as in these tables, takes {some_wall:.1f} ms
in FP8 and {some_bf16_wall:.1f} in bf16: presumably electrical power limits FP8 more. 4 x 24576 takes {large:.1f} ms in the trace
and {large_wall:.1f} in these tables, torch's layers {large_bf16:.1f} and {large_bf16_wall:.1f}.

For 128 experts the trace has {many_products:.2f} ms of products, {many_rows:.2f} of casts of rows and {many_weights:.2f} of casts
of weights, beside {many_bf16:.2f} ms for torch's grouped products: many weights and short sums leave few FLOPs for each byte that
is cast, and the limit is {many_speed:.2f}, or {many_speed_kept:.2f} with casts of weights kept. With one weight tensor for each
of so many experts, CPU time decides; one tensor for all (`single_grouped_weight=True`) is cast in one launch.

What was tried, beside what [products](#fp8-products-opfuses-kernel-compared-with-cublaslt) tried: keeping casts of weights, the
last row of the tables by wall and host time; the gated activation in the launch of the product before it, which was slower, or of
the cast behind it; and casting rows as they are read, both in tables of their own.

**Mixtures.** Products, the gate and the sum of rows take most of a mixture's step, so the fusions around its experts change it
little. Rows cast as they are read: {read} x the speed of the step that copies them first. Activation and derivative in one launch
with their casts: {together} x the step with two launches for each, though these launches alone have {activation} x the speed of
two for the activation, and {derivative} x for the derivative. By bytes the derivative would gain 1.8; presumably it does not
since its tiles take the registers of 512 threads, so that a multiprocessor runs one block at a time."""

HOST = """\
For small models the CPU decides. *infer* is a forward pass under `torch.no_grad()`; *host* is the CPU time to queue a call,
*wall* what a user waits, *replayed* the same step as a CUDA graph. Relative times are to eager bf16. The machine of this record
has nvmath, by which products cost the host half of what torch's op does. On an H100 on 2026-11-27, without it and then with
it, A 256 x 256 took 3.2, 3.7 and 3.4, then 1.9, 2.2 and 2.0 times eager for inference under delayed, current and block scaling,
and 2.2, 2.4 and 2.3, then 1.3, 1.4 and 1.3 for training (`benchmarks/results/h100.json`).

The launches of a call are a CUDA graph here, since its tensors have the addresses of an earlier one
([torch.md](torch.md#repeated-calls)). The record before that, of the same day and another machine, had 2.0, 2.3 and 2.0 for
inference and 1.7, 1.3 and 1.3 for training.

Hosts differ more than versions do: in a later run, on 2026-11-29, on an H200 of another host or a busier one, a training step of
A 256 x 256 took 2.1, 1.6 and 1.5 times eager, past the first limit. In turns with the sources before kernels were loaded by CuPy
it took in microseconds, on that day, 1128 and 1093 under delayed scaling (1171 and 1033 before), 961 and 916 under current (1143,
1042), 867 and 800 under block (1036, 1009).

"""

INSIDE = """\
Medians of rounds in which the variants of one table take turns. *Compiled*: the whole model in one graph, the same graph for
all recipes. *Offload*: what autograd saves is copied to pinned host memory and back; the share of the copies' time during
which a kernel ran too is by torch.profiler."""

OVERHEAD = """\
Extra time of observing, relative to the same step without. `watch(every=100)` looks at one step in a hundred, which runs op
by op; `watch(every=1)` at every step. *tracing* is `OPFUSE_TRACE`; *without sources* does not record the lines of code that
values come from. The first columns are wall times of a step of B, where the GPU decides; the last two are CPU time of a step
and of a plan of A.

"""

CONVERTED = """\
Layers of Llama 3 8B from transformers with random weights, two sequences of 4096 tokens, converted by `fuse_`. *called* runs
them as they are, *compiled* with torch.compile on each layer. Speedups are over the plain layers in bf16 under torch.compile.
AdamW is torch's fused one. There are two sequences, since with one the speed would be the machine's: of a forward and backward
pass over one, called, the kernels take 25.3 ms under delayed scaling, 27.0 under current and 29.4 under block scaling, and the
CPU takes 19 to 21 ms to queue them (three processes on an H200 on 2026-11-28).

"""

LIBRARIES = """\
A training step of the same layers by the number of tokens, 16384 in four sequences, everything compiled: opfuse, torchao 0.18
with one scale for each tensor (its default), and bf16. *packed* is `fuse_(pack=True)`. Speeds are over bf16 and over torchao in
the same rounds. With few tokens the CPU decides, so these figures depend on the machine more than others, and opfuse's ops take
it longer than torchao's compiled code. With 16384 the GPU decides: opfuse is faster with one scale for each tensor, and a little
slower with one for each block. *as a graph*: the whole step of compiled layers, AdamW included, as one CUDA graph
(`opfuse.graphed_step`), bf16 too, and attention that needs no look at positions ([torch.md](torch.md#a-whole-step)).

"""

SMALL = """\
Four Llama layers 1024 wide with 256 tokens, forward and backward, where the CPU decides. Each way of running them stands beside
bf16 run in the same way: *called*; *compiled*, layer by layer; *reduce-overhead*, compiled in that mode of torch, which makes
CUDA graphs of what lies between opfuse's ops; *as a graph*, both passes as one CUDA graph (`opfuse.graphed_step`). Models take
turns of eighteen steps, of which the last six are measured: by then launches of steps that are alike are CUDA graphs. On three
H200s of one day called layers had 0.81 to 0.90 times the speed of bf16 under current scaling and 0.81 to 0.86 under block
scaling, compiled ones 0.58 to 0.61 and 0.54 to 0.62. In turns with `OPFUSE_LAUNCH_GRAPHS=0`, sixteen steps each, compiled steps
took 13.0 and 13.6 ms with launches as graphs, and 16.8 and 15.6 without; called ones 21.2 and 21.9, and 23.7 and 19.9 (bf16 7.5
compiled, 16.4 called; on a busy host, as noisy as that shows).

"""

MIXTURES = """\
Two layers of transformers' models with random weights, sequences of 4096 tokens, forward and backward; experts in bf16 are
transformers' `grouped_mm`. *called* and *compiled* are as above, and so is what speeds are over; *as a graph* is both passes of
the compiled layers as one CUDA graph. Below the wall time stands what the device does, by the names of kernels, with launches
in parentheses, how long the host takes to queue a step, and what a forward pass leaves for the backward pass, also under
`keep="quantized"`. Of Qwen3's shape at 8192 tokens the CPU decides, and machines with this GPU differ: on four H200s of one day
compiled layers had 0.92, 0.99, 0.99 and 1.09 times the speed of bf16 under current scaling, 1.00, 1.05, 1.05 and 1.13 under
block scaling. In one sequence of 16384 tokens attention takes half of a step of Qwen3's shape, and what FP8 gains is half as
much: 1.12 times the speed on 2026-11-30 (1.35 to 1.40 for Mixtral's).
[mixtures-part-by-part](decisions/mixtures-part-by-part.md) says what was tried.

"""

STEPS = """\
A step of a whole Llama with random weights on 32 768 tokens (1.1 B parameters) or 8192 tokens (8 B): layers compiled one by one
and packed, head, loss, the gradient's norm and the optimizer. *adamw* is torch's fused one over fp32 masters, *adamw8bit*
torchao's with moments in 8 bits on bf16 weights that are rounded at random ([moments in 8 bits](howto.md#moments-in-8-bits)).
*compiled loss* is transformers' own under torch.compile, *fused loss* that of `fuse_(loss="fused")`, which never has the logits
of all tokens; for *quantized loss* a policy has the head's products in FP8, too (current scaling where the layers have
delayed). Each row is relative to the first row in bf16 of its table: of 1.1 B parameters with fp32 masters, of 8 B with moments
in 8 bits, since masters would not fit. Rows of bf16 in a graph tell what the graph alone gains: most under *adamw8bit*, whose
steps the CPU queues too slowly otherwise, so that runs without a graph differ by as much as machines do. Each case ran by
itself, bf16 before and behind those that are compared with it (`python -m benchmarks.steps`).

torchao's optimizer steps in the graph, where there is one ([torch.md](torch.md#a-whole-step)). Outside of it the GPU may wait
for the CPU: a step of it over 1.1 B parameters takes the host 97 ms and the GPU 22, where torch's fused AdamW over fp32 masters
takes 10 in all. torchao 0.18 calls torch.compile for each parameter at each step: for the 199 parameters here that is 58 of the
103 ms that its step takes the host of another machine, with small parameters. On another H200, under delayed scaling with the
head in FP8, a step with it in the graph took 334 ms in place of 387 with 32 768 words, and 399 in place of 433 with 128 256.

Memory that torch has from the GPU grows as it needs it here (`PYTORCH_ALLOC_CONF=expandable_segments:True`). Without that a
graph holds pieces that no tensor fits in: with the optimizer in the graph 41.9 GiB in place of 37.2 with 32 768 words
(`recompute`, head in FP8), and 49.2 in place of 43.6 with 128 256 (chunks of 2048 tokens).

Runs differ by a point or two: on another H200 of the same day the three cases with 8-bit moments that are nearest to their
limits, delayed with 32 768 words, fused and quantized, and with 128 256, `keep="all"`, had 1.30, 1.32 and 1.30 times the speed
of bf16.

In a trace of a step with 128 256 words and chunks of 2048 tokens, kernels took 415 ms with the fused loss and 408 with the
compiled one. Of the 415 ms the head and its loss take 87 ms: products 76, the loss kernel 11. Torch's ops for the same losses,
timed by themselves, take 42. Compiled, head and loss take 80, with one product in place of 16. Chunks of 4096 tokens, as the
record has them, took 5 ms less of a step with the head in FP8, and 1.5 GiB more.

"""

ADAPTERS = """\
LoRA of rank 16 at every linear layer of Llama 3 8B's layers, with adapters in bf16, both passes and AdamW over the adapters:
PEFT over weights in bf16, and PEFT over transformers' `FP8Linear` as `fuse_(pack=True)` converts it under `Float8BlockScaling()`,
which multiplies the stored bytes in both passes. Peaks are those of a process that trains one model. *In checkpoints* are all 32
layers, called and compiled. There the GPU waits for the CPU: in a trace of eight layers the kernels of a called step took
84 ms (bf16: 114), and the CPU 120 ms to queue them (71). *As a graph* the compiled step is one CUDA graph
(`opfuse.graphed_step`), of both. transformers' own FP8 is compared where its kernel can be had:
[weights.md](weights.md#train-an-fp8-model-of-transformers) has a run with it.

"""

ROLLOUT = """\
Four layers of Llama 3 8B's width, eight sequences of 1024 tokens, under `Float8BlockScaling(backward_override="dequantized")`:
decoding 32 tokens more, and a forward and a backward pass, with `opfuse.invariant` and without it, in turns. Of decoding the CPU
decides. What invariance adds to it, 36 to 46 ms in three runs on 2026-11-30, weighs more since launches of steps that are alike
are CUDA graphs: before, on another host, decoding took 534 ms with it and 508 without.

"""

ESTIMATES = """\
How far [`opfuse.memory`](howto.md#estimate-memory) is off: the estimate from a model without values, beside the most that a step
allocated on this GPU.

"""

MEMORY = """\
*saved* is what autograd keeps for the backward pass, in parentheses what the formats require; *peak* is that of one forward and
backward pass. Both are also relative to bf16: to the pipeline without a recipe, or to the same decoder layers in torch. In the
peak of one pipeline, what its largest layer holds for a while counts as much as what is saved; over several layers, what they
save decides. The peaks are those of a second step, which records what later steps repeat. By default casts of weights are made
anew in the backward pass, and since 2026-11-29 casts of a norm's results, too. With `keep="all"`, which saves both, four layers
saved 90 to 91 % in place of 74 (before norms were among them), and peaks were 101 and 94 % in place of 87 and 80. Converted and
compiled, four layers of Llama took on an H200 in turns, with 8192 tokens, in current scaling 62.3 ms by default, 63.0 under
`keep="recompute"` and 65.3 under `"quantized"` (bf16 86.7); they saved 3656, 3208 and 2312 MiB of bf16's 4360, with peaks of
4392, 4056 and 3384 MiB (bf16 4760). Since inputs of norms are kept in FP8 under `"quantized"`, too, that is 2127 MiB and a peak
of 3223, at 1.33 in place of 1.36 times the speed of bf16. The projection behind attention saves attention's result, which
attention saves anyway, in place of its cast; before, they saved 3784 MiB.

"""

TRAINING = "Final loss of `opfuse run` with native products, and its distance from the same run in bf16.\n\n"

COMPILING = """\
A first call of a kernel compiles it with NVRTC, or loads it from the disk cache; each figure is of a process of its own.
First training steps are one forward and backward pass in a process that has run a step of the
same layers in plain bf16, the median of several processes; they include imports, planning, and compiling or loading kernels.
Machines with the same GPU differ here, by their CPUs: on three H200s of three days the slowest of these first steps took 688,
777 and 815 ms with an empty cache, and 249, 302 and 341 ms from disk.

"""

SANITIZER = """\
Initcheck does not see what Hopper's copy engine (TMA) stores, so two cases in which a cast reads what a product stored are
left out of it; `python -m benchmarks.sanitizer --unseen` shows this with a short program."""

SPREAD = """
Experts of a mixture over the ranks, by `ExpertParallel`: one layer of experts of Qwen3-30B-A3B's and of Mixtral's shape, 8192
tokens on each rank, forward and backward, other routes in each call. Torch in bf16 moves rows by index, multiplies by
`grouped_mm`, and has its elementwise parts compiled.

"""

SEVERAL = """\
FSDP2 over four layers with the sizes of an 8B model (4096 wide, 14336 inside, 32 heads, 8 key-value heads), 4096 tokens on
each rank, each layer sharded by itself and freed between the passes. *gathered* is what a rank sends to all-gathers in a
step, relative to bf16. Times are medians of the slowest rank, relative to eager torch. *beside kernels* is the share of the
gathers' time during which other kernels ran, by torch.profiler, in three steps that follow each other. AdamW updates fp32
masters of weights stored quantized, otherwise bf16 weights. The first gather of a step waits for the optimizer, in all of them,
and a CPU that is late uncovers more: the share was 54, 83 and 91 % on three machines of one day. torchao was not on this machine;
on 2026-11-22, on two other H200s, its FP8 gathers with compiled layers took 0.84 of the time of torch with AdamW, opfuse 0.77.

"""
