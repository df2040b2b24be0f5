"""Lines that are no fault themselves but tell how far one reaches: everywhere or here, again or once, over or not."""

from __future__ import annotations

from keepstep.core.diagnose.rule import Rule


def _tag(id: str, pattern: str, words: str, says: str, *samples: str) -> Rule:
    return Rule(
        id=id,
        role="context",
        category="none",
        pattern=pattern,
        words=tuple(words.split("|")),
        says=says,
        weight=0.0,
        source="operators' notes",
        samples=samples,
    )


CONTEXT: tuple[Rule, ...] = (
    _tag(
        "everywhere",
        r"\b(?:all|every|each|both)\b (?:of the |the )?(?:\d+ )?(?:other )?(?:ranks?|nodes?|workers?|hosts?|writers|pods|replicas|agents|gpus|processes|machines|attempts)|on (?:all|every) \d*|\b(\d+) (?:of|/) \1\b (?:ranks|nodes|agents|workers|gpus)|same (?:error|message|exception|line|failure|traceback|stack)\b.{0,40}(?:on|by|from|for) (?:\d+ of|all|every|ranks)|identical on|everyone",
        "all|every|each|both| of |same|identical|everyone",
        "the same everywhere",
        "(all ranks, step 0, three attempts)",
        "exitcode: 1 on all 512 ranks 4 s after start",
        "(the same error and Xid 31 on 64 of 64 ranks on 8 nodes, all at step 3)",
    ),
    _tag(
        "only_here",
        r"\b(?:rank|node|host|gpu) ?\d+ only\b|\bother (?:\d+ )?(?:nodes?|hosts?|machines?|ranks?|gpus?|pods?|workers?) ?: (?!.*\b(?:same|also|too|as well|alike)\b)|other (?:nodes|hosts|machines) (?:did|do|does|have|had|were|are) not|\bonly \w+-?\d+$|no other (?:node|host|machine|rank|gpu|job)|(?:others?|peers|the rest|all other \w+|other \w+)\W{0,3}\d|on no other|nowhere else|\ball others?\b (?:pass|fine|ok|normal)|\bonly (?:on |from )?(?:node|rank|host|gpu|this|that|one|rack|\w+-\d+)\b|there only|no \w+ on any other|(?:other|remaining|all other) (?:\d+ )?(?:nodes?|ranks?|gpus?|hosts?|machines?|workers?)\W{0,3}(?:.{0,24}\b(?:no|fine|normal|ok|healthy|unlimited|unaffected|alive|clean|zero|pass|see it)\b|[\d-]+ ?(?:Gi?B|%|C|MHz|ms|s|W)?\b(?!.*rank))|others?\b.{0,20}(?:fine|normal|unaffected|healthy|\b0\b)|\b(?:1|one) (?:of|out of) \d+ (?:nodes|ranks|hosts)|single (?:node|host|rank)",
        "only|any other|other|others|remaining|single|one|of |no other|others|other |peers|the rest|on no other|nowhere else|other|only|other|only",
        "only here",
        "only node-090 of 32 nodes affected",
        "other nodes: no nfs messages",
        "node-101 $ ulimit -l : 64 ; other nodes: unlimited",
    ),
    _tag(
        "again",
        r"(?:again|same (?:place|position|sample|batch|iteration|step)|every time|each time|every (?:restart|attempt|retry|run)|deterministic\w*|reproduc(?:es|ible|ed)|(?:two|three|four|five|\d+) (?:restarts|attempts|tries|retries|times)|always at|(?:third|second|3rd|2nd) (?:attempt|restart|time)|repeats|repeatedly)\b",
        "again|same|every|each time|determin|reproduc|restarts|attempts|tries|retries|times|always|third|second|rd|nd|repeat",
        "it happens again",
        "nan again at step 70045, dp rank 5",
        "three attempts",
    ),
    _tag(
        "elsewhere_too",
        r"(?:on|to|with|using) (?:a )?(?:different|other|another|new|fresh|replaced|healthy|spare) (?:nodes?|hardware|machines?|hosts?|gpus?)|after (?:swapping|replacing|moving|the swap)|moved to (?:other|another)|different hardware|replay(?:ed)? on (?:node|\\S+\\d)",
        "different|replay|other|another|new|fresh|replaced|healthy|spare|swapping|replacing|moving|swap|moved",
        "it was tried on other machines",
        "restart from step 70000 on different nodes: nan again at step 70045, dp rank 5",
    ),
    _tag(
        "own_other_job",
        r"job \d+ of the same user|(?:another|second|other) job of (?:the same|this) user|two jobs",
        "same user|this user|two jobs",
        "another job of the same user takes part",
        'LISTEN 0 2048 *:29500 users:(("python3",pid=90122,fd=3))   # job 8121 of the same user, running since 2 days',
    ),
    _tag(
        "peers_normal",
        r"as on (?:every|all) other|(?:equal|same|usual|ordinary) on all|on all (?:nodes|hosts|ranks) [\d-]+|other (?:nodes|hosts) [\d-]+|normally \d",
        "other|equal|same|usual|ordinary|on all|normally",
        "the job's own processes are as everywhere",
        "node-014 sar: kbslab 960110244 (other nodes 4-6 GB); python3 rss on all nodes 45-48 GB",
    ),
    _tag(
        "restarted",
        r"will restart worker group|(?:attempt|try|restart) ?#?[2-9]\b(?! of| ?/)|restarting (?:the )?(?:worker|job|all)|Rendezvous complete|relaunch|(?:next|second|third) attempt",
        "restart|attempt|try|rendezvous complete|relaunch|attempt",
        "the job was started again",
        "api: [default] Worker group FAILED. 3/3 attempts left; will restart worker group",
    ),
    _tag(
        "retried",
        r"Retrying|retry loop|attempt \d+ (?:of|/) ?\d+|will retry|\bretried\b|retry \d+|backing off",
        "retry|retried|attempt|backing off",
        "the program itself tried again",
        "download of shard.00019.mds failed (attempt 1 of 3): ClientError SlowDown",
    ),
    _tag(
        "mig",
        r"mig\.mode|\bMIG\b.{0,30}(?:enabled|on\b|slice|instance)|MIG-GPU|MIG-[0-9a-f]{8}",
        "mig",
        "GPUs of the machine are cut into slices",
        "node-011 $ nvidia-smi --query-gpu=index,mig.mode.current --format=csv,noheader",
    ),
    _tag(
        "saved",
        r"(?:step|checkpoint|ckpt|state)\S* (?:\S+ )?(?:saved|written|complete)\b|next job of the chain|\bchained\b|job \S+ of the chain|requeue[sd]? (?:it|itself)|dependency.{0,20}after|(?:saved|saving|checkpoint(?:ed)? (?:written|saved)|wrote) .{0,60}(?:ckpt|checkpoint|step|before)",
        "saved|saving|wrote|written|saved|written|complete|chain|requeue|dependency",
        "the job saved before it ended",
        "[rank0] saved /ckpt/step_88100",
    ),
    _tag(
        "pulling_image",
        r"pulling (?:the |an )?image|Successfully pulled image|still pulling",
        "pulling|pulled",
        "a container image was fetched",
        "1m   Normal   Pulled    pod/job-3   Successfully pulled image",
    ),
    _tag(
        "recovered",
        r"^(?!.*\b(?:without|no|not|never|nor)\b.{0,30}(?:succe|recover|\bok\b|\bback\b|\bup\b|restored|fine)).*?(?:restarted .{0,80}\b(?:ok|fine|runs|went on|healthy)\b|(?:rebalanc\w+|repair|rebuild\w*|fail-?over|scrub|drain|recovery|resync) (?:is )?(?:finished|done|completed?)|temperature/speed normal|then resolved|restart came up|attempt \d+\W.{0,60}\b(?:complete|joined|running|started|succeeded)|rendezvous complete|connection restored|(?:drained|cleared|restored|healthy|resolved|ready|back|running|reachable|up) (?:again|at|after|since) \d|\badopted\b|(?:busbw|bandwidth|latency|step time|throughput) (?:is )?(?:back|normal)|successfully pulled|after \d+ ?(?:min\w*|s|sec\w*|h) (?:the )?(?:job|it|training) (?:starts|went on|runs|continues)|(?:next|later) (?:save|attempt|try|upload).{0,30}succe|then succeeded|succeeded on (?:the )?(?:second|third|next)|training (?:goes|went) on|(?:gone|stable|fine|ok) (?:since|after|again)|retry ok|\b(?:saved|upload\w*|writes?|retr(?:y|ies)|init|connect\w*|download\w*|resum\w*|mount|server \S+|attempt \d+|next (?:steps?|save|try))\b.{0,40}\b(?:OK|ok|succeed(?:ed|s)?|success\w*|normal|fine|completed|passed)\b|succeeded (?:on|after) (?:retry|attempt)|back to normal|came back|came up|recovered|\bgone\b.{0,30}OK|step time \d|loss (?:back|returned)|later .{0,20}OK|reconnected|counters clean|went away|continues? (?:normally|training)|then (?:ok|fine|normal)|started (?:normally|up)|came in|later attempt|complete(?:d)? after (?:a |the |\d+ )?retr|resumed (?:from|at|training))",
        "ok|succe|complete|resumed|normal|fine|completed|passed|came back|came up|recovered|gone|step time|back|returned|reconnected|clean|went away|continue|started|came in|later attempt|attempt|rendezvous complete|connection restored|drained|cleared|restored|healthy|resolved|ready|back|running|reachable|adopted|normal|successfully pulled|after|succe|goes on|went on|gone|stable|fine|ok|finished|done|complete|temperature/speed|resolved|restart came|restarted",
        "it went on afterwards",
        "retry 1 after 15 s: saved OK ; nas event log: controller failover 03:12:40-03:12:58",
        "10 s later: pid 3310 gone, CUDA init OK",
        "step 21881 completed, step time 97.2 s, next steps normal",
    ),
    _tag(
        "finished",
        r"all (?:workers|ranks|processes|pods) (?:exited|ended|finished) (?:with )?(?:code )?0\b|Signaling Trainer to stop|Trainer\.fit stopped|early stopping|EarlyStopping:|training (?:is )?(?:finished|complete|completed|done)|(?:finished|completed) (?:training|successfully)|exit(?:ed with)? code:? 0\b|exit code 0|successfully (?:finished|completed)|(?-i:COMPLETED)\b|Job (?:has )?completed|reached max (?:steps|epochs)|`?Trainer\.fit`? stopped: `?max_(?:steps|epochs)|run (?:succeeded|complete)|all epochs done",
        "training|finished|completed|exit code|exited with code|succe|reached max|trainer|complete|epochs done|exited|ended|finished|signaling trainer|trainer|early stopping|earlystopping",
        "the job finished",
        "step 100000 reached, training finished, exit code 0 on all ranks",
    ),
    _tag(
        "recent_change",
        r"after (?:the )?(?:commit|merge|change|update|upgrade|refactor|pull|deploy|new (?:image|version|code))|commit [0-9a-f]{7,}|since (?:commit|the (?:last )?(?:change|update|commit))|last (?:commit|change) |new code version|previous (?:code|version|commit) (?:ran|trained|worked)|code (?:version|change)|regression",
        "after|commit|since|last|new code|previous|code|regression",
        "the code had changed just before",
        "(all ranks, step 0, after commit 'swap mlp')",
    ),
    _tag(
        "bad_hyperparameters",
        r"\blr \d\S* since|(?:peak|base|max) (?:lr|learning rate)|learning rate|\blr\b.{0,20}(?:->|raised|increased|too high|\d+e?-?\d* to|changed|set to)|warm-?up.{0,30}(?:0|disabled|removed|missing)|fp16|half precision|no gradient clipping|clip\w*.{0,20}(?:disabled|off|0)|bf16 (?:->|to) fp16|loss scal|without clipping",
        "learning rate|lr|peak|warm|fp|half precision|clip|bf|loss scal",
        "learning rate or precision had been changed",
        "lr raised 3e-4 -> 3e-3, warmup removed",
    ),
    _tag(
        "stale_process",
        r"ppid 1\b|job attempt \d|previous (?:attempt|run|job|process)|by attempt \d+ of the same job|orphan|defunct|zombie|left[- ]?over|stale (?:process|python|pid)|old (?:process|python|pid)|earlier (?:attempt|run|job)|still (?:holds|running|held)|job \d+,? ended",
        "previous|attempt|orphan|defunct|zombie|left|stale|old|earlier|still|ended|ppid|job attempt",
        "a process of an earlier attempt is still there",
        "existing context: pid 3310 (previous attempt of this job, exiting, in D state)",
    ),
    _tag(
        "foreign_process",
        r"(?:another|other|foreign|different) (?:user|job|tenant|container|team|process)\b|(?:not|does not) belong to (?:this|the) job|\bpid \d+ of (?:another|other|user)|leaked (?:gpu )?(?:memory|context)|shared (?:gpu|node) with",
        "another|other|foreign|different|belong|pid|leaked|shared",
        "a process that is not of this job takes part",
        "GPU 3: 71 GiB used by process 4123 of another user",
    ),
    _tag(
        "many_times",
        r"\((?P<count>\d{1,4}) (?:DOWN/ACTIVE|down/up|up/down|flaps?|times|pairs|events)|(?P<count2>\d{1,4}) (?:link )?(?:flaps|down events|resets)|flapp(?:ed|ing) (?P<count3>\d+)|recurr\w+|repeatedly|(?P<count4>\d+)(?:th|rd|nd) (?:flap|time|occurrence)",
        "down/active|down/up|up/down|flap|times|pairs|events|resets|recurr|repeatedly|occurrence",
        "it happened many times",
        "(14 DOWN/ACTIVE pairs in 30 minutes)",
    ),
    _tag(
        "first_time",
        r"first (?:event|time|flap|occurrence|error)\b|: 0 -> 1\b|no previous|never before|once in",
        "first|->|no previous|never before|once in|>",
        "it happened for the first time",
        "link_downed counter mlx5_3: 0 -> 1 (first event since boot 61 days ago); symbol errors 0; rx power nominal",
    ),
    _tag(
        "healthy_here",
        r"(?:no Xid|ECC counters? zero|DCGM .{0,20}pass|diag\w* pass\w*|hardware (?:is )?(?:fine|healthy|ok)|all (?:health )?checks? pass\w*|burn-?in pass\w*)",
        "no xid|ecc counter|pass|hardware",
        "the machine passes its tests",
        "node-004: no Xid, ECC counters zero, DCGM level 3 pass",
    ),
    _tag(
        "place",
        r"rank \d+\W+(?:on |at |is |= ?)?\(?(?:node|host)|\(rank \d+|\brank\W{0,3}\d+.{0,30}node|node.{0,30}\brank\W{0,3}\d+|comm 0x\w+ rank \d+ nranks|Init COMPLETE",
        "rank",
        "which node a rank is on",
        "py-spy dump rank 21 (node-004): Thread MainThread",
    ),
)
