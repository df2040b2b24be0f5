"""File systems, object stores, checkpoints."""

from __future__ import annotations

from keepstep.core.diagnose.rule import Rule, data, infra, passing, user

_CKPT = r"(?:ckpt|checkpoint|\.pt\b|\.pth\b|\.distcp|\.safetensors|global_step|mp_rank|optim|model_states|\.ckpt\b|state_dict|iter_\d)"
STORAGE: tuple[Rule, ...] = (
    infra(
        "storage_mount_hang",
        r"nfs: server (?P<thing>\S+) not responding|nfs:? .*(?:timed out|not responding)|(?:mount|filesystem|file system|lustre|gpfs|beegfs|weka|vast|ceph|juicefs|fuse)\b.{0,60}(?:hang|hung|not responding|stalled|unresponsive|blocked)|state D\b.{0,40}(?:nfs|rpc_wait|lustre)|rpc_wait_bit_killable",
        "not responding|nfs|mount|filesystem|file system|lustre|gpfs|beegfs|weka|vast|ceph|juicefs|fuse|rpc_wait",
        "a shared file system does not answer",
        weight=0.76,
        family="storage_stall",
        transient=True,
        source="Linux NFS client",
        samples=(
            "node-004 kernel: nfs: server fs02 not responding, still trying",
            "nfs: server 192.0.2.16 not responding, timed out",
        ),
    ),
    Rule(
        id="storage_back",
        role="context",
        category="none",
        pattern=r"nfs: server \S+ OK|(?:mount|server|filesystem|storage|nas)\b.{0,40}(?:\bOK\b|back\b|recovered|reconnected|restored)|Connection restored to",
        words=("nfs", "mount", "server", "filesystem", "storage", "nas", "connection restored"),
        says="the storage came back",
        source="Linux NFS client",
        samples="node-000 kernel: nfs: server fs01 OK",
    ),
    infra(
        "lustre_evicted",
        r"LustreError.*|Lustre: .*(?:evict|lost connection|Connection to .* was lost|not responding)|(?:client|this node) was evicted by|mmfs\S*.{0,60}(?:expel|lost|fail)|GPFS.{0,60}(?:stale|expel|unmount|panic)|ceph.{0,60}(?:session lost|hung|evicted|socket closed|mds\d* (?:hung|down))|beegfs.{0,60}(?:error|unreachable)|Transport endpoint is not connected",
        "lustre|evicted|mmfs|gpfs|ceph|beegfs|transport endpoint",
        "the machine lost its connection to the parallel file system",
        weight=0.74,
        family="storage_stall",
        transient=True,
        source="Lustre, GPFS, FUSE",
        samples=(
            "LustreError: 11-0: scratch-OST0004-osc: operation ost_write to node 10.0.1.3@o2ib failed: rc = -107",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data/shard_3'",
        ),
    ),
    passing(
        "nfs_failover_estale",
        r"Stale (?:NFS )?file handle|\bESTALE\b|Errno 116",
        "stale|estale|errno",
        "a handle of the shared file system became stale, as after a fail-over of its server",
        weight=0.74,
        source="huggingface/transformers#9732",
        samples="[rank8]: OSError: [Errno 116] Stale file handle: '/nas/ckpt/step_900/optim_8.pt'",
    ),
    infra(
        "storage_quota",
        r"Disk quota exceeded|\bEDQUOT\b|Errno 122|quota.{0,30}(?:exceeded|reached|full)|QuotaExceeded",
        "quota|edquot|errno",
        "a storage quota is used up",
        action="free_storage_then_resume",
        weight=0.88,
        source="open-mmlab/mmdetection#12069",
        samples="OSError: [Errno 122] Disk quota exceeded: '/shared/ckpt/run42/step_14000/__31_0.distcp.tmp'",
    ),
    infra(
        "storage_full",
        r"No space left on device|\bENOSPC\b|Errno 28\b|disk (?:is )?full|100% /(?!dev/shm)|no inodes|StorageFull|DiskPressure|ephemeral[- ]storage.{0,40}(?:exceed|evict|low)",
        "no space left|enospc|errno|disk full|disk is full|% /|inodes|storagefull|diskpressure|ephemeral",
        "a file system is full",
        action="free_storage_then_resume",
        weight=0.86,
        family="full",
        source="Linux",
        samples=(
            "OSError: [Errno 28] No space left on device: '/ckpt/step_100.tmp'",
            "The node was low on resource: ephemeral-storage. DiskPressure",
        ),
    ),
    infra(
        "storage_read_only",
        r"Read-only file system|\bEROFS\b",
        "read-only file|erofs",
        "a file system became read-only",
        role="symptom",
        weight=0.66,
        family="scope",
        source="Linux",
        samples="[rank267]: OSError: [Errno 30] Read-only file system: '/local/nvme2/ckpt/step_610.tmp'",
    ),
    infra(
        "storage_io_error",
        r"\[Errno 5\]|Input/output error|\bEIO\b|Remote I/O error|Errno 121\b",
        "input/output error|errno|eio|remote i/o error",
        "reading or writing fails with an input/output error",
        weight=0.68,
        family="scope_io",
        source="Linux",
        samples="OSError: [Errno 5] Input/output error: '/data/shard-00017.bin'",
    ),
    passing(
        "object_store_throttle",
        r"(?<!HW )(?<!thermal )\bSlowDown\b|Please reduce your request rate|TooManyRequests|429 (?:Too Many|Client Error)|ServiceUnavailable|503 (?:Slow|Service|Server)|Throttl\w+|RequestLimitExceeded|rateLimitExceeded|InternalError.{0,40}(?:PutObject|GetObject|UploadPart)|ServerBusy|HTTP (?:Error )?(?:429|500|502|503|504)\b",
        "slowdown|reduce your request|toomanyrequests|too many|serviceunavailable|slow|service|server|throttl|limitexceeded|internalerror|serverbusy|http",
        "the object store asks for fewer requests",
        weight=0.74,
        source="DistributedScience/Distributed-CellProfiler#123",
        samples=(
            "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): Please reduce your request rate.",
            "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url",
        ),
    ),
    passing(
        "object_store_unreachable",
        r"EndpointConnectionError|Could not connect to the endpoint URL|(?:Connect|Read)TimeoutError?\b.{0,80}(?:http|s3|endpoint|url|storage)|ReadTimeoutError|ConnectTimeoutError|HTTPS?ConnectionPool\(.{0,200}(?:Max retries|timed out|refused|unreachable)|RequestTimeout|IncompleteRead|ChunkedEncodingError|ProtocolError.{0,40}Connection|TransportError.{0,60}(?:gcs|s3|storage)|ClientConnectorError|huggingface\S*.{0,60}(?:timed? ?out|unreachable)|We couldn't connect to 'https",
        "endpointconnectionerror|endpoint url|timeouterror|timeout|httpsconnectionpool|httpconnectionpool|incompleteread|chunkedencoding|protocolerror|transporterror|clientconnectorerror|huggingface|couldn't connect",
        "an object store or web service cannot be reached",
        weight=0.72,
        family="remote_service",
        source="botocore, urllib3",
        samples=(
            'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://objstore.internal/ckpt/run42/step_9000/"',
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url",
        ),
    ),
    user(
        "storage_credentials",
        r"AccessDenied|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentialsError|Unable to locate credentials|403 (?:Forbidden|Client Error)|401 (?:Unauthorized|Client Error)|token (?:has |is )?expired|credentials? (?:have |has )?expired|GatedRepoError|InvalidToken|certificate has expired|CERTIFICATE_VERIFY_FAILED|authentication fail|Invalid API key|PermissionDenied",
        "accessdenied|expired|invalidaccesskey|signaturedoesnotmatch|credentials|forbidden|client error|unauthorized|gatedrepo|invalidtoken|certificate|authentication fail|api key|permissiondenied",
        "the job's credentials are missing, wrong or expired",
        weight=0.8,
        source="botocore, huggingface_hub",
        samples=(
            "botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the GetObject operation: The provided token has expired.",
            "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        ),
    ),
    user(
        "permission_denied",
        r"PermissionError|Permission denied|\bEACCES\b|Operation not permitted",
        "permissionerror|permission denied|eacces|not permitted",
        "the job may not read or write a path",
        weight=0.7,
        family="scope",
        source="Linux",
        samples="PermissionError: [Errno 13] Permission denied: '/shared/ckpt/run42'",
    ),
    user(
        "too_many_open_files",
        r"Too many open files|\bEMFILE\b|received \d+ items of ancdata|unable to open shared memory object.{0,80}Too many",
        "too many open|emfile|ancdata",
        "the job opens more files than its limit allows",
        weight=0.76,
        family="scope",
        source="PyTorch",
        samples=("OSError: [Errno 24] Too many open files", "RuntimeError: received 0 items of ancdata"),
    ),
    data(
        "truncated_checkpoint",
        r"PytorchStreamReader failed|failed finding central directory|invalid header or archive is corrupted|HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer|SafetensorError|unexpected EOF, expected \d+ more bytes|pickle data was truncated|invalid load key|_pickle\.UnpicklingError|EOFError: Ran out of input|(?:"
        + _CKPT
        + r").{0,120}(?:truncated|corrupt\w*|checksum|incomplete|mismatched? (?:size|hash)|damaged|crc|hash mismatch)|(?:corrupt\w*|truncated|incomplete|checksum|crc|hash mismatch).{0,80}"
        + _CKPT
        + r"|ran out of bytes|unexpected pos \d+ vs \d+",
        "pytorchstreamreader|central directory|archive is corrupted|headertoolarge|invalidheader|metadataincomplete|safetensorerror|unexpected eof|truncated|invalid load key|unpicklingerror|ran out of|corrupt|checksum|incomplete|mismatch|damaged|crc|unexpected pos",
        "a checkpoint file is cut off or damaged",
        action="use_previous_checkpoint",
        weight=0.82,
        family="checkpoint",
        source="nerfstudio-project/nerfstudio#2202",
        samples=(
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
            "_pickle.UnpicklingError: pickle data was truncated",
            "checksum mismatch in /ckpt/step_5200/rank3.distcp",
        ),
    ),
    data(
        "missing_checkpoint",
        r"(?:No such file or directory|FileNotFoundError|not found|missing|does not exist|NoSuchKey).{0,120}"
        + _CKPT
        + r"|"
        + _CKPT
        + r".{0,80}(?:No such file|not found|is missing|does not exist|missing (?:shard|file|key)s?\b)|CheckpointException|No (?:valid )?checkpoint found",
        "no such file|filenotfound|not found|missing|does not exist|nosuchkey|checkpointexception|checkpoint found",
        "a file of a checkpoint is missing",
        action="use_previous_checkpoint",
        weight=0.74,
        family="checkpoint",
        source="torch.distributed.checkpoint",
        samples="FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/step_400/__12_0.distcp'",
    ),
    user(
        "resume_config_change",
        r"Error\(s\) in loading state_dict|size mismatch for |Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict|(?:tensor|pipeline|model|expert|data)[-_ ]parallel.{0,60}(?:does not match|mismatch|differs|changed)|checkpoint.{0,60}(?:world size|different (?:config|parallel|model)|was saved with|incompatible)|loaded state dict (?:contains|has) |world size.{0,40}(?:does not match|differs)",
        "loading state_dict|size mismatch for|in state_dict|parallel|checkpoint|loaded state dict|world size",
        "the checkpoint does not fit the model or its parallel layout",
        weight=0.86,
        source="acids-ircam/RAVE#196",
        samples=(
            "RuntimeError: Error(s) in loading state_dict for GPTModel: size mismatch for decoder.layers.0.mlp.fc1.weight: copying a param with shape torch.Size([3584, 4096]) from checkpoint",
            "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        ),
    ),
)
