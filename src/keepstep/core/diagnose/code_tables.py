"""Codes that are no Xid: what NCCL, CUDA, the kernel and the shell say by a number or a name.

Each table is data; ``codes`` reads it, and the reference page is made from it.
"""

from __future__ import annotations

from keepstep.model import exits

Row = tuple[str, str, str]
"""Name, what it means, what to do (empty where the code alone asks for nothing)."""

NCCL: dict[int, Row] = {
    0: ("ncclSuccess", "no error", ""),
    1: (
        "ncclUnhandledCudaError",
        "a CUDA call inside NCCL failed; the CUDA error before it is the cause",
        "investigate",
    ),
    2: (
        "ncclSystemError",
        "a system call inside NCCL failed: network device, memory limit or a dead peer",
        "investigate",
    ),
    3: ("ncclInternalError", "NCCL met a state it does not know; look for the WARN line before it", "investigate"),
    4: ("ncclInvalidArgument", "the program gave NCCL a wrong argument", "stop_and_notify_user"),
    5: (
        "ncclInvalidUsage",
        "the program calls NCCL wrongly, or ranks run different versions",
        "stop_and_notify_user",
    ),
    6: ("ncclRemoteError", "another rank exited or the network failed: a consequence; look there", "investigate"),
    7: ("ncclInProgress", "an operation has not finished yet", ""),
}
"""``ncclResult_t`` by its number."""

NCCL_NAMES: dict[str, Row] = {
    **{name.lower(): (name, what, action) for name, what, action in NCCL.values()},
    "nccltimeout": (
        "ncclTimeout",
        "an operation took too long: a consequence; look for the rank that is missing",
        "investigate",
    ),
}

_USER = "stop_and_notify_user"
CUDA: dict[int, Row] = {
    0: ("cudaSuccess", "no error", ""),
    1: ("cudaErrorInvalidValue", "the program gave CUDA a wrong argument", _USER),
    2: ("cudaErrorMemoryAllocation", "the GPU's memory is full: a smaller batch, or find what grows", _USER),
    3: (
        "cudaErrorInitializationError",
        "CUDA could not start: driver, or a fork after CUDA was used",
        "investigate",
    ),
    4: ("cudaErrorCudartUnloading", "CUDA was called while the process ended: a consequence", ""),
    35: ("cudaErrorInsufficientDriver", "the driver is older than the program's CUDA", _USER),
    46: (
        "cudaErrorDevicesUnavailable",
        "the GPU is busy or not allowed: another process holds it, or compute mode",
        "isolate_and_verify",
    ),
    100: (
        "cudaErrorNoDevice",
        "no GPU is visible: CUDA_VISIBLE_DEVICES, the container, or a GPU that was lost",
        "isolate_and_verify",
    ),
    101: ("cudaErrorInvalidDevice", "the program asks for a GPU number that does not exist", _USER),
    200: ("cudaErrorInvalidKernelImage", "a kernel's image is damaged or was built for something else", _USER),
    209: ("cudaErrorNoKernelImageForDevice", "the program was not built for this kind of GPU", _USER),
    214: ("cudaErrorECCUncorrectable", "uncorrectable error in GPU memory", "replace_node"),
    217: (
        "cudaErrorPeerAccessUnsupported",
        "two GPUs cannot reach each other directly: IOMMU, ACS or topology",
        "investigate",
    ),
    218: ("cudaErrorInvalidPtx", "a kernel's PTX could not be compiled", _USER),
    220: ("cudaErrorNvlinkUncorrectable", "an NVLink failed during the execution", "replace_node"),
    222: ("cudaErrorUnsupportedPtxVersion", "the program's PTX is newer than the driver", _USER),
    300: ("cudaErrorInvalidSource", "a kernel's source is not valid", _USER),
    301: ("cudaErrorFileNotFound", "a file of CUDA was not found", _USER),
    304: ("cudaErrorOperatingSystem", "a call of the operating system failed", "investigate"),
    400: (
        "cudaErrorInvalidResourceHandle",
        "the program uses a stream or event of another GPU or of none",
        _USER,
    ),
    500: ("cudaErrorSymbolNotFound", "a named symbol does not exist in the program", _USER),
    600: ("cudaErrorNotReady", "an operation has not finished yet", ""),
    700: (
        "cudaErrorIllegalAddress",
        "a kernel touched memory that is not its own, mostly an error of the application",
        _USER,
    ),
    701: ("cudaErrorLaunchOutOfResources", "a kernel asks for more registers or shared memory than there are", _USER),
    702: ("cudaErrorLaunchTimeout", "a kernel ran longer than the driver allows", "investigate"),
    704: ("cudaErrorPeerAccessAlreadyEnabled", "peer access was switched on twice", ""),
    710: (
        "cudaErrorAssert",
        "an assertion in a kernel failed, mostly an index out of range: a label or token id of the data",
        _USER,
    ),
    712: ("cudaErrorHostMemoryAlreadyRegistered", "memory was pinned twice", _USER),
    713: ("cudaErrorHostMemoryNotRegistered", "memory was unpinned that was never pinned", _USER),
    714: ("cudaErrorHardwareStackError", "the GPU's call stack failed: recursion too deep, or hardware", "investigate"),
    715: ("cudaErrorIllegalInstruction", "a kernel met an instruction that is none", "investigate"),
    716: ("cudaErrorMisalignedAddress", "a kernel touched memory at an odd address", _USER),
    717: ("cudaErrorInvalidAddressSpace", "a kernel used an address of another kind of memory", _USER),
    718: ("cudaErrorInvalidPc", "a kernel's program counter ran away", "investigate"),
    719: (
        "cudaErrorLaunchFailure",
        "a kernel failed without saying why; the kernel log tells whether the GPU did (Xid)",
        "investigate",
    ),
    720: ("cudaErrorCooperativeLaunchTooLarge", "a cooperative launch has too many blocks", _USER),
    800: ("cudaErrorNotPermitted", "the operation is not permitted", _USER),
    801: ("cudaErrorNotSupported", "this GPU or driver cannot do it", _USER),
    802: (
        "cudaErrorSystemNotReady",
        "the machine's GPUs are not ready: on machines with NVSwitch the fabric manager does not run",
        "replace_node",
    ),
    803: (
        "cudaErrorSystemDriverMismatch",
        "the driver in the kernel and its library are of different versions",
        "replace_node",
    ),
    804: ("cudaErrorCompatNotSupportedOnDevice", "the compatibility library does not support this GPU", _USER),
    805: ("cudaErrorMpsConnectionFailed", "the MPS server cannot be reached", "investigate"),
    900: ("cudaErrorStreamCaptureUnsupported", "an operation is not allowed while a graph is captured", _USER),
    901: ("cudaErrorStreamCaptureInvalidated", "the capture of a graph was broken by an earlier error", _USER),
    999: ("cudaErrorUnknown", "CUDA does not know itself; the kernel log may (Xid)", "isolate_and_verify"),
}
"""``cudaError_t`` by its number."""

DRIVER_NAMES = {
    "cudaSuccess": "CUDA_SUCCESS",
    "cudaErrorMemoryAllocation": "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorInitializationError": "CUDA_ERROR_NOT_INITIALIZED",
    "cudaErrorDevicesUnavailable": "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "cudaErrorInvalidKernelImage": "CUDA_ERROR_INVALID_IMAGE",
    "cudaErrorNoKernelImageForDevice": "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "cudaErrorECCUncorrectable": "CUDA_ERROR_ECC_UNCORRECTABLE",
    "cudaErrorInvalidResourceHandle": "CUDA_ERROR_INVALID_HANDLE",
    "cudaErrorSymbolNotFound": "CUDA_ERROR_NOT_FOUND",
    "cudaErrorLaunchFailure": "CUDA_ERROR_LAUNCH_FAILED",
}
"""Where the driver's name for an error is not the runtime's in other letters."""

SIGNALS: dict[int, Row] = {
    1: ("SIGHUP", "the terminal or session that had started the process was closed", _USER),
    2: ("SIGINT", "somebody pressed Ctrl-C", "no_action"),
    3: ("SIGQUIT", "told to stop and to leave a core file", "no_action"),
    4: ("SIGILL", "an instruction that this processor does not know: wrong build", _USER),
    5: ("SIGTRAP", "a trap in native code: a debugger, or a check that failed", _USER),
    6: ("SIGABRT", "the process ended itself, as NCCL's watchdog does after a time-out", "investigate"),
    7: ("SIGBUS", "memory behind a file is missing, mostly because /dev/shm is too small", _USER),
    8: ("SIGFPE", "an arithmetic fault in native code", _USER),
    9: ("SIGKILL", "killed from outside: by the kernel for want of memory, the scheduler or a person", "investigate"),
    10: ("SIGUSR1", "a notice of the scheduler, mostly before the time limit", "no_action"),
    11: ("SIGSEGV", "a crash in native code", "investigate"),
    12: ("SIGUSR2", "a notice of the scheduler or of another program", "no_action"),
    13: ("SIGPIPE", "whoever read its output has gone", "investigate"),
    14: ("SIGALRM", "a timer that the program had set itself", _USER),
    15: ("SIGTERM", "told to stop; whoever sent it knows why", "no_action"),
    24: ("SIGXCPU", "it has used up its limit of CPU time", _USER),
    25: ("SIGXFSZ", "a file grew beyond the limit of the process", _USER),
    31: ("SIGSYS", "a system call that is forbidden here (seccomp)", _USER),
}

EXITS: dict[int, tuple[str, str]] = {
    exits.DONE: ("finished", "no_action"),
    1: ("an uncaught exception of a Python program, or any program's general error", ""),
    2: ("wrong arguments, as argparse reports them", _USER),
    exits.BAD_USAGE: ("keepstep: wrong flags or arguments", _USER),
    exits.BAD_CONFIG: ("keepstep: wrong configuration or version", _USER),
    exits.PREFLIGHT: ("keepstep: refused before anything started", _USER),
    exits.NO_PROGRESS: ("keepstep: the same fault came back without progress; do not restart", _USER),
    124: ("`timeout` ended the program when its time was over", "investigate"),
    125: ("docker, podman or timeout failed before the program started", "investigate"),
    126: ("the program is not executable", _USER),
    127: ("the program was not found", _USER),
    exits.REQUEUE: (
        "keepstep: an infrastructure fault that needs another allocation, or saved before a preemption",
        "",
    ),
    255: ("the code -1 of a program, or ssh or srun could not reach the machine", "investigate"),
}
"""Exit codes with a meaning of their own; 128 + n is the end by signal n."""
