"""What the job reads, and what it computes: broken shards, odd samples, numbers that run away."""

from __future__ import annotations

from keepstep.core.diagnose.rule import Rule, data, harmless, infra, passing, user

_SHARD = r"(?:\.(?:tar|parquet|jsonl?|arrow|tfrecord\S*|bin|idx|npy|npz|h5|hdf5|lmdb|mdb|csv|tsv|txt|zst|gz|xz|zip|jpe?g|png|webp|mp4|wav|flac|mds|beton|record|avro)\b|shard|dataset)"
DATA: tuple[Rule, ...] = (
    infra(
        "sdc_suspect",
        r"^(?!.*\b(?:same|again|equal|nan|too|also|as well|identical)\b).*\b(?:re-?run|replay\w*)\b.{0,60}\bon (?:an?)?(?:other|a spare|a different|another) (?:node|gpu|machine|host)s?\b\W{0,3}(?:loss |norm )?\d",
        "rerun|re-run|replay",
        "another machine gives another result for the same step",
        action="isolate_and_verify",
        role="symptom",
        weight=0.7,
        family="suspect",
        source="operators' notes",
        samples="grad norm spike 41.0 on rank 729 only; replay of step 5100 on another node: 0.33",
    ),
    data(
        "corrupt_shard",
        r"\bCorrupt\w* (?:\w+ ){0,3}(?:data|block|page|record|frame|stream)|decompress\w*.{0,30}(?:fail|error|corrupt)|snappy.{0,40}(?:corrupt|fail|invalid)|Can't read data|file read failed|filter returned failure|unable to (?:read|lock) .{0,20}(?:hdf5|dataset)|does not (?:fit|match) (?:the |its )?(?:index|idx)|shorter than (?:its |the )?index|size \d+ .{0,40}(?:index|idx|pointer)|(?:sha\d+sum|md5sum|checksum|hash).{0,60}(?:FAILED|differs?|mismatch|wrong)\b(?!.{0,40}(?:rank|replica|weights|ckpt|checkpoint))|zeros? at offset|hole of zeros|incorrect (?:data|header|length) check|buffer is smaller than requested|(?:md5|sha\d+)\b.{0,40}(?:differs?|deviates?|mismatch)|invalid (?:block|stored block|distance|bit length|code lengths)|CRC(?:32)? check failed|Not a gzipped file|tarfile\.(?:Read|Truncated|Header)\w*Error|BadZipFile|BadGzipFile|zlib\.error|zstd\S*.{0,60}(?:corrupt|Data corruption|Unknown frame|incomplete|error)|ZstdError|lz4.{0,40}(?:fail|corrupt)|unexpected end of (?:data|file|stream|archive)|Compressed file ended before|ArrowInvalid|Parquet magic bytes not found|Couldn't deserialize thrift|DataLossError|corrupted record|truncated record|DATA_LOSS|LMDB.{0,40}(?:corrupt|PAGE_NOTFOUND|invalid)|MDB_CORRUPTED|h5py.{0,60}(?:truncated|unable to open)|truncated file|(?:shard|sample|record|dataset|archive|"
        + _SHARD
        + r")\S*.{0,60}(?:corrupt\w*|truncated|damaged|checksum (?:mismatch|error|fail\w*)|bad magic|hash mismatch)|(?:corrupt\w*|truncated|damaged|checksum (?:mismatch|fail\w*)).{0,80}"
        + _SHARD
        + r"|bad magic number|Index file.{0,40}(?:doesn't|does not) match|MMapIndexedDataset.{0,60}(?:assert|invalid)",
        "crc|not a gzipped|tarfile|badzip|badgzip|zlib|zstd|lz|unexpected end|compressed file ended|arrowinvalid|magic|thrift|dataloss|data_loss|corrupt|truncated|lmdb|mdb_|hpy|damaged|checksum|hash mismatch|index file|mmapindexed|sum|checksum|hash|offset|zeros|incorrect|buffer is smaller|md|sha|invalid|index|idx|pointer|can't read data|read failed|filter returned|unable to|decompress|snappy|corrupt",
        "a file of the training data is damaged",
        weight=0.84,
        family="data_file",
        source="Python, Arrow, webdataset",
        samples=(
            "zlib.error: Error -3 while decompressing data: invalid distance too far back",
            "tarfile.ReadError: unexpected end of data",
            "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file.",
            "tensorflow.python.framework.errors_impl.DataLossError: corrupted record at 1024",
        ),
    ),
    data(
        "undecodable_sample",
        r"UnicodeDecodeError|JSONDecodeError|UnidentifiedImageError|cannot identify image|image file is truncated|broken data stream when reading image|DecompressionBombError|Invalid data found when processing input|moov atom not found|(?:decode|decoding|parse|parsing).{0,40}(?:fail|error).{0,60}(?:sample|image|video|audio|record|line|"
        + _SHARD
        + r")|codec can't decode|!_src\.empty\(\)|(?:has|is) 0 bytes|no payload|Corrupt JPEG|csv\.Error|pandas\.errors\.ParserError|Error tokenizing data|Expecting value: line|Extra data: line|Unterminated string",
        "unicodedecode|jsondecode|unidentifiedimage|identify image|image file|broken data stream|bomb|invalid data|moov|decod|pars|codec can|_src|bytes|no payload|corrupt jpeg|csv|tokenizing data|expecting value|extra data|unterminated string",
        "a sample of the training data cannot be decoded",
        weight=0.82,
        family="data_file",
        source="Python, Pillow, ffmpeg",
        samples=(
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x9c in position 12: invalid start byte",
            "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
    ),
    data(
        "missing_shard",
        r"(?:No such file or directory|FileNotFoundError|NoSuchKey|404|not found|does not exist|is missing).{0,120}"
        + _SHARD
        + r"|"
        + _SHARD
        + r".{0,60}(?:No such file|not found|is missing|does not exist|NoSuchKey)|DatasetNotFoundError|HDF5.{0,40}unable to open",
        "no such file|filenotfound|nosuchkey|not found|does not exist|missing|datasetnotfound|unable to open",
        "a file of the training data is missing",
        weight=0.72,
        family="data_file",
        source="Python",
        samples=(
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/web/web-01733.tar'",
            "botocore.errorfactory.NoSuchKey: An error occurred (NoSuchKey): the specified key data/shard-00017.tar does not exist",
        ),
    ),
    data(
        "token_id_out_of_range",
        r"(?:token|label|class)s? ?(?:id)?s? .{0,30}(?:>=|exceeds?|out of (?:range|vocab|bounds)|larger than|above).{0,40}(?:vocab|embedding|num_classes|rows|\d)|\b(?:index|id)s? .{0,30}(?:>=|exceeds?|out of (?:range|vocab|bounds)|larger than|above).{0,40}(?:vocab|embedding|num_classes)|max (?:token )?id \d+|(?:token )?ids? up to \d+|(?:tokenized|tokenised|tokenizer|cache)\b.{0,60}(?:was made with|different|another|wrong|mismatch|other) |vocab(?:ulary)?[_ ]size.{0,40}(?:mismatch|exceed|smaller|!=)|labels?\S*:? \d+\.\.\d+|label.{0,30}(?:out of range|negative|invalid|mismatch)",
        "token|cache|label|index|max id|up to|vocab|ids",
        "ids in the data exceed the model's vocabulary",
        weight=0.84,
        family="data_value",
        source="deepspeedai/Megatron-DeepSpeed#207",
        samples=(
            "batch dump: max token id 151936, embedding rows 128256 ; shard tok-qwen-0007 (other shards max id 128255)",
        ),
    ),
    data(
        "bad_sample",
        r"without (?:it|that|them)\b:? ?(?:the )?(?:loss |step )?(?:is )?\d|sample (?:is |comes |was )?from \S+|\d+ ?% of (?:the |that |this )?(?:shard|batch|documents?|samples|file|part)\w*.{0,60}(?:repeated|duplicat|identical|one document|the same)|one (?:document|sample|record|row) (?:is )?repeated|follows the (?:batch|data|sample)|(?:batch|sample|data) (?:source|origin)\W.{0,60}(?:docs?|rows?|samples?|lines?) \d|identical tokens|repeated (?:tokens|bytes|characters)|(?:\\x00){2}|with(?:out)? (?:those|that|these|the|this) (?:batch|sample|shard|document|file|record|part)\w* (?:skipped|removed|excluded|left out)|\d+ of \d+ (?:documents|samples|records|rows|lines|sequences) (?:from|of|in|are|have)|(?:skipping|skipped|excluding|removing) (?:batch|sample|shard|document|record|part)\w*[ \d.-]*.{0,20}(?:loss|step)|(?:has|have|of|with) (?:length|size) 0\b|negative (?:length|size|duration)|(?:sample|record|document|doc|batch|shard|rows?|example|image|utterance|sequence)\b.{0,80}(?:all zero|all -100|all masked|empty|zero[- ](?:length|tokens)|nan in|contains? (?:nan|inf)|inf values|bad|malformed|duplicate|poisoned|outlier|degenerate|repeated (?:\d+|character|token|word|line)|garbage|constant|blank|hex dump|base64)|non-?empty TensorList|num_samples should be a positive|\b0 of \d+ (?:lines|samples|rows|records)|\bloss without (?:it|them|that)\b|without (?:them|it|that|this|the)\b:? ?(?:step|sample|batch|shard|file)|\b(?:inf|nan) in \d+ of|(?:label|loss|attention)[_ ]mask (?:is )?(?:all zero|empty)|(?:NaN|Inf|nan|inf)s? (?:in|found in) (?:the )?(?:input|batch|data|feature|label)s?\b|mean over 0 tokens|empty (?:batch|sequence|label)|skipping (?:that|this|the) (?:sample|batch|shard|document)",
        "sample|record|document|doc|batch|shard|rows?|example|image|utterance|sequence|mask|nan|inf|mean over|loss without|without|non-empty|nonempty|num_samples| of  lines|lines|rows|empty|skipping|skipped|removed|excluded|left out|documents|samples|records|rows|sequences|skipping|excluding|removing|length|size|duration|follows the|source|origin|identical tokens|repeated|\\x|repeated|duplicat|identical|one document|the same|without it|without that|without them|sample is from|sample from|sample comes from|sample was from",
        "one sample of the data is degenerate",
        weight=0.8,
        family="data_value",
        source="marin-community/levanter#391",
        samples=(
            "batch dump: sample 18 of shard web-01733.tar idx 44021: label mask all zero -> cross_entropy mean over 0 tokens = nan",
            "skipping that sample: step 70045 loss 2.07",
        ),
    ),
    user(
        "nan_loss",
        r"\b(?:loss|lm_loss|train_loss|lm loss|grad(?:ient)?[_ ]?norm|gnorm|logits?|activations?|param\w*|perplexity)\b\W{0,6}(?:value|is|was|became|at step \d+:?|of)?\W{0,4}\(?(?:nan|inf|-inf)\b|(?:NaN|Inf|nan) (?:check|detected|found|in|or Inf|loss|gradient|grad)|non-?finite|found NaN|found (?:inf|nan)|loss (?:is |became |went |turned )?(?:NaN|Inf|infinite)|nan (?:again )?at step|step \d+,? (?:loss )?nan\b|is not finite|returned nan values|Rank \d+: found NaN in local grad norm|FloatingPointError",
        "nan|inf",
        "the loss or a gradient is not a number",
        weight=0.7,
        family="nan",
        source="PyTorch, Megatron-LM",
        samples=(
            "loss: step 8810 2.113, step 8811 nan",
            "[rank37]: NaN check: NaN detected in outgoing all_reduce buffer (TORCH_NCCL_NAN_CHECK=1), rank 37, pg tp_4",
            "step 70044 loss 2.08 ; step 70045 loss nan on data-parallel rank 5 only",
            "RuntimeError: Function 'PowBackward0' returned nan values in its 0th output.",
            "iteration 100 | lm loss: nan | grad norm: inf",
        ),
    ),
    user(
        "loss_divergence",
        r"loss (?:is )?(?:above|outside) (?:the )?(?:window|band|limit|baseline)|\bdiverg(?:es|ed|ing)\b|spike: .{0,40}loss|loss spike|loss jump|loss \d+(?:\.\d+)? ?-> ?(?:[5-9]|\d{2,})(?:\.\d+)?\b|grad(?:ient)?[ _]norm \d+(?:\.\d+)? ?-> ?(?:\d{2,}|\de\d)|(?:loss|gradient|grad[_ ]?norm).{0,30}(?:diverg|explod|spike|blew up|blow[ns]? up|jump(?:ed|s)?)|(?:diverg|explod)\w*.{0,30}(?:loss|gradient)|loss \d+\.\d+ -> \d{2,}|Current loss scale already at minimum|loss scale.{0,30}(?:minimum|reached 0|below|too small)|cannot decrease scale anymore",
        "loss|grad|scale|->|>|loss above|loss outside|diverg|spike|loss jump",
        "training diverges",
        weight=0.62,
        family="nan",
        source="DeepSpeed",
        samples=(
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "loss spike at step 900: 2.1 -> 9.8",
        ),
    ),
    harmless(
        "loss_scale_step",
        r"(?:Gradient )?overflow.{0,40}(?:skipp|reducing|loss scale)|loss scaler? (?:reducing|reduced|adjust)|Attempted loss scale|skipping (?:step|update).{0,30}(?:overflow|inf|nan)|reducing (?:loss )?scale",
        "overflow|loss scal|skipping|reducing",
        "the loss scaler skips a step, as it should",
        weight=0.45,
        source="apex, DeepSpeed",
        samples="Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    ),
    infra(
        "silent_data_corruption",
        r"^(?!.*(?:ckpt|checkpoint|shard )).*(?:re-?run|replay\w*|repeat\w*|same (?:batch|step|input)\w*)\b.{0,80}\b(?:spare|other|another|different)\b.{0,40}\b(?:finite|normal|correct|clean|fine|ok)\b|^(?!.*(?:ckpt|checkpoint|shard )).*(?:self-?test|matmul|gemm|alu|fma)\b.{0,60}(?:wrong|incorrect|bad) |\bwrong in \d+ of \d+|^(?!.*(?:ckpt|checkpoint|shard )).*(?:fingerprint|weights? hash|param\w* hash|replica hash).{0,60}ranks? \d+ 0x[\da-f]+.{0,80} 0x[\da-f]+|^(?!.*(?:ckpt|checkpoint|\.distcp|\.pt\b|safetensors|shard|dataset|parquet|download)).*(?:run A \S+,? run B|(?:same (?:inputs?|step|microbatch|seed|batch)|replay\w*|rerun|re-run|recomput\w*|self-?test|gemm|bitwise|determinis\w*).{0,100}(?:differ|mismatch|not (?:equal|identical|reproducible|bit)|non-?reproducible|diverge|inconsistent|wrong result|unequal)|(?:checksum|hash|fingerprint|parity)\w*.{0,60}(?:differ|mismatch|diverge|unequal).{0,60}\b(?:replica|rank|gpu|dp|node|weight|param|grad)\w*\b|(?:replica|weights|parameters?|gradients?)\b.{0,60}(?:checksum|hash|fingerprint|bitwise).{0,60}(?:differ|mismatch|diverge)|silent data corruption|\bSDC\b.{0,30}(?:found|detected|suspect|confirm)|wrong (?:result|answer|product|value).{0,40}(?:gpu|gemm|matmul|test))",
        "run a|same|replay|rerun|re-run|recomput|self|gemm|bitwise|determinis|checksum|hash|fingerprint|parity|replica|weights|parameter|gradient|silent data|sdc|wrong|fingerprint|hash|wrong|incorrect|bad|spare|another|different|other node|other gpu",
        "the same inputs give different results on this GPU",
        action="isolate_and_verify",
        weight=0.9,
        family="sdc",
        source="pytorch/torchtitan#951",
        samples=(
            "replay of step 8811 on rank 37 (node-004 GPU5), same inputs and RNG: run A nan, run B 2.1128, run C nan",
            "weights checksum mismatch: replica rank 12 differs from 15 others",
        ),
    ),
    infra(
        "shared_fs_slow",
        r"(?:open|stat|metadata|mds\w*|client)(?:\(\))?.{0,30}(?:latency|overload|flood)|data wait \d+ ?s|(?:mds|oss|ost)\w*:? .{0,30}(?:overload|queue|load \d{3})",
        "latency|overload|flood|data wait|mds|oss|ost",
        "the shared storage is slow for everybody",
        role="symptom",
        action="retry_with_backoff",
        transient=True,
        weight=0.6,
        family="fs_slow",
        source="Lustre job statistics",
        samples="client open() latency: median 4.1 s on all 64 nodes (yesterday 0.002 s)",
    ),
    passing(
        "slow_data",
        r"data ?loader.{0,40}(?:slow|stall|starv|bottleneck)|(?:waiting|waited|blocked|wait) (?:for|on) (?:the )?(?:next )?(?:batch|data)\b.{0,30}\b\d{2,}(?:\.\d+)? ?s\b|data (?:stall|starvation)|prefetch queue empty",
        "loader|waiting|blocked|data|prefetch queue",
        "the ranks wait for data",
        role="symptom",
        weight=0.4,
        family="stall",
        source="step timing",
        samples="rank 3 blocked on next batch for 44 s",
    ),
)
