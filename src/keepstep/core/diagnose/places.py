"""Which node, GPU and rank a line speaks about, and which rank lives where."""

from __future__ import annotations

import re
from collections import Counter

from keepstep.core.diagnose.prefix import Line, is_host, is_speaker

RANKS_TRACKED = 200_000
NODES_TRACKED = 50_000

_HOST = re.compile(
    r"(?<![\w./-])((?:node|host|gpu|dgx|hgx|compute|trn|nid|cn|vm|server|worker|trainer|gn|hpc|a100|h100|h200|b200|mi300|rack\d*)"
    r"(?:[a-z][a-z0-9]{0,60})?(?:-[a-z][a-z0-9]{0,60}){0,8}-?\d+(?:-\d+)*|ip-\d+-\d+-\d+-\d+|[a-z][a-z0-9]{1,11}(?:-[a-z0-9]{1,12}){0,3}-\d{2,5})(?![\w/])(?!\.\w)",
    re.IGNORECASE,
)
_NODE_RANGE = re.compile(
    r"(?<![\w-])([a-z][a-z-]{0,40})(\d{1,9})\.\.(?:\1)?(\d+)|(?<![\w-])([a-z][\w-]{0,60})\[(\d+)-(\d+)[,\d-]*\]|nodes (\d+)-(\d+)",
    re.IGNORECASE,
)
_NOT_A_NODE = re.compile(
    r"(?:gpus?\d+-\d+$|rank|step|epoch|gpu|shard|utf|cuda|sha|ext|port|stage|layer|attempt|version|leaf|spine|switch|tor|sw|pcie|fp|bf|int|iso|"
    r"mlx|errno|worker|trainer|mi|raid|dgx-a|web|tok|part|batch|sample|model|llama|qwen|gpt|bert|python|torch|nccl|http|signal|pid|h|a|b)"
    r"[-_]?\d{0,6}$|.*\b(?:shard|web|tok|leaf|spine|switch|tor|qwen|llama|gpt|model|ckpt|step|iter|run|job|epoch|version)[-_]",
    re.IGNORECASE,
)
_SERVICE = re.compile(
    r"(?:login|head|mgmt|bastion|admin|gateway|ctl|slurmctl\w*|controller|master|registry|nas|nfs|mds|oss|ost|st|fs|filer|pdu|sw|leaf|spine)[-_]?\d*$",
    re.IGNORECASE,
)
_NEVER = re.compile(
    r"(?:\d{4}-\d\d|0[0-9a-f]|[0-9a-f]{7,}$|\d+-\d+$|rank|step|epoch|shard|utf|sha|port|layer|leaf|spine|switch|tor|mlx|errno|0x|127\.|0\.0)",
    re.IGNORECASE,
)
_RANK = re.compile(r"\brank[ =:#_]{0,2}\[?(\d{1,6})\b", re.IGNORECASE)
_BLOCK_RANK = re.compile(r"\brank {2,}: (\d{1,6}) \(local_rank")
_PCI = re.compile(r"(?<![\w:])([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.\d)?\b", re.IGNORECASE)
_DEVICE = re.compile(
    r"(?P<other>pcieport|pciehp|mlx[45]_\w+|ixgbe\w*|i40e|iavf|\bice\b|\bigb\b|e1000e?|bnxt\w*|be2net|\btg3\b|qede?\b|\bena\b|\befa\b|nvme|"
    r"ahci|[xe]hci|megaraid|mpt\dsas|hpsa|vfio|irdma|hfi1|cxgb4|\bgve\b|virtio|nvswitch|sxid|bridge|ioatdma|idxd)|gpu|nvrm|xid|nvidia|amdgpu",
    re.IGNORECASE,
)
"""Words before a PCI address that say what has it; a GPU or something ``other``."""
_GPU = re.compile(
    r"\b(?:GPU|Device|cuda:|hip:|npu:|nvidia-smi.{0,8} -i|accelerator)[ #:=]?[\[\x22]?(\d{1,2})\b(?!\s*(?:GPUs?|of|total|GiB|MiB|GB|C\b|%|-\d))",
    re.IGNORECASE,
)
_DATA_FILE = re.compile(
    r"(?<![\w./:@+-])[\w./:@+-]{0,300}\.(?:tar|parquet|jsonl?|arrow|tfrecord|bin|idx|npy|npz|h5|lmdb|mdb|csv|tsv|txt|mds|jpe?g|png|webp|mp4|wav|flac|"
    r"record|avro|webm|mkv)(?:\.(?:gz|zst|zstd|xz|bz2|lz4))?(?![\w.]*\w)",
    re.IGNORECASE,
)
_PEER = re.compile(r"\[?(\d{1,3}(?:\.\d{1,3}){3})\]?")
_CALLED = re.compile(
    r"(?:no (?:heartbeat|response|reply|answer|keep-?alive)s? (?:from|by)|heartbeat from|\bping|\bssh(?: to)?|\bnode(?: name)?|\bhost(?:name)?|\bmachine|"
    r"\binstance|\baddress|\bip|\bnodename|\bnodelist|\bserver name|\b(?:kubelet|pods?|agent|raylet|worker)s? (?:on|at)|\bonly(?: on)?|\bcordon(?:ed)?|"
    r"\bdrain(?:ed)?|\bevict(?:ed)? node|\bresources? \[)[ /:='\"(]{1,3}"
    r"(?P<name>(?!\d+\b)[a-z0-9][a-z0-9-]*\d[a-z0-9-]*(?:\.[a-z0-9][a-z0-9-]*)*)(?![\w/])",
    re.IGNORECASE,
)
"""Words that call what follows a machine, whatever its name looks like."""
_STEM = re.compile(r"([A-Za-z][A-Za-z-]*?)-?\d+$")
_TOKEN = re.compile(r"(?<![\w./-])([A-Za-z][A-Za-z-]*\d+)(?![\w/-])(?!\.\w)")
_BLOCK = re.compile(r"\s+(?:host\s+: ([\w.-]+)|rank\s+: (\d{1,6}) \(local_rank)")
"""Lines of torchrun's report of failures, which names the host first and the rank after it."""
_LIVES = re.compile(
    r"\branks? (\d{1,6}) ?(?:(?:=|is on|is|on|@|at|runs on|lives on) ?\(?|\()(?:node |host )?(?P<name>[a-z][\w.-]*\d[\w.-]*)(?:[ ,:]{1,2}(?:local )?GPU ?(\d{1,2}))?",
    re.IGNORECASE,
)
_INIT = re.compile(r"\brank (\d+) nranks (\d+)(?: cudaDev (\d+))?", re.IGNORECASE)


def hosts(text: str) -> list[str]:
    """Names of machines in the text, in order."""
    found = [one for one in _HOST.findall(text) if is_host(one) and not _NOT_A_NODE.match(one)]
    return list(dict.fromkeys(found))


def is_service(node: str) -> bool:
    """Whether the name is that of a machine on which no ranks run."""
    return bool(_SERVICE.match(node))


def called(text: str) -> list[str]:
    """Names that the text itself calls a node, a host or an address."""
    found = [one for one in _CALLED.findall(text) if is_host(one) or one.count(".") == 3 or "-" in one]
    return [one for one in dict.fromkeys(found) if not _NEVER.match(one)]


def ranks(text: str) -> list[int]:
    """Ranks that the text names one by one."""
    if found := _BLOCK_RANK.search(text):
        return [int(found[1])]
    return [int(one) for one in _RANK.findall(text)]


def is_node_range(text: str) -> bool:
    """Whether the text names many nodes at once: ``node-000..node-031``, ``gpu[001-064]``, ``nodes 112-127``."""
    return bool(_NODE_RANGE.search(text))


def gpu(text: str) -> str:
    """PCI address or index of the GPU in the text; addresses of bridges, network cards and drives are passed over."""
    for found in _PCI.finditer(text):
        devices = list(_DEVICE.finditer(text, 0, found.start()))
        if not devices or not devices[-1]["other"]:
            return found[1].lower()
    index = _GPU.search(text)
    return index[1] if index else ""


def data_file(text: str) -> str:
    """The last file of training data that the text names."""
    found = _DATA_FILE.findall(text) if "." in text else []
    return str(found[-1]).strip("'\"(") if found else ""


def address(text: str) -> str:
    found = _PEER.search(text)
    return found[1] if found else ""


class Places:
    """Learns from every line read which rank runs on which node."""

    def __init__(self) -> None:
        self.node_of: dict[int, str] = {}
        self.gpu_of: dict[int, str] = {}
        self.nodes: Counter[str] = Counter()
        self.speakers: Counter[str] = Counter()
        self.ranks: set[int] = set()
        self.world = 0
        self.stems: Counter[str] = Counter()
        self._host = ""

    def named(self, text: str) -> list[str]:
        """Machines in the text, also those whose names are only known from others that are like them."""
        found = [*called(text), *hosts(text)]
        for token in _TOKEN.findall(text):
            if (stem := _STEM.match(token)) and stem[1].lower() in self.stems:
                found.append(token)
        return list(dict.fromkeys(found))

    def learn(self, line: Line) -> None:
        named = hosts(line.text) if len(line.text) < 2000 else []
        if len(line.text) < 2000:
            named = list(dict.fromkeys([*called(line.text), *named]))
        for one in dict.fromkeys([line.node, *named]):
            if one and (one in self.nodes or len(self.nodes) < NODES_TRACKED):
                self.nodes[one] += 1
        if line.node and (line.node in self.speakers or len(self.speakers) < NODES_TRACKED):
            self.speakers[line.node] += 1
            if (stem := _STEM.match(line.node)) and len(self.stems) < NODES_TRACKED:
                self.stems[stem[1].lower()] += 1
        if line.rank is not None and len(self.ranks) < RANKS_TRACKED:
            self.ranks.add(line.rank)
        if found := _BLOCK.match(line.message):
            if found[1]:
                self._host = found[1]
            elif self._host:
                self._place(int(found[2]), self._host, "")
        if (lives := _LIVES.search(line.text)) and not _NEVER.match(lives["name"]) and is_speaker(lives["name"]):
            self._place(int(lives[1]), lives["name"], lives[3] or "")
        elif found := _INIT.search(line.text):
            self.world = max(self.world, int(found[2]))
            if line.node:
                self._place(int(found[1]), line.node, found[3] or "")
        elif line.rank is not None and line.node:
            self._place(line.rank, line.node, "")
        elif len(named) == 1 and len(mentioned := ranks(line.text)) == 1:
            self._place(mentioned[0], named[0], gpu(line.text))

    def _place(self, rank: int, node: str, gpu: str) -> None:
        if rank in self.node_of or len(self.node_of) < RANKS_TRACKED:
            self.node_of[rank] = node
            if gpu:
                self.gpu_of[rank] = gpu
