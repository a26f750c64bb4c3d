-- Wireshark dissector for messages over RDMA (docs/RDM.md; sections are cited as §), below Wireshark's own RoCEv2.
--
-- Copy this file into the directory that Help > About Wireshark > Folders calls "Personal Lua Plugins", or load it once:
--   tshark -X lua_script:bifrost-rdm.lua -r capture.pcapng -Y 'bifrost_rdm.message == 7'
-- Wireshark takes UDP port 4791 for RoCEv2; another one: Decode As > RRoCE.

local rdm = Proto("bifrost_rdm", "Bifrost messages over RDMA")

local send_kinds = { [1] = "EAGER", [2] = "REPAIR", [3] = "ANNOUNCE" }
local control_kinds = { [1] = "ACK", [2] = "GRANT", [3] = "PROBE", [4] = "CLOSE", [5] = "LANE" }
local classes = { [0] = "message", [1] = "request", [2] = "response", [3] = "failure", [4] = "write", [5] = "read" }
local reasons = { [1] = "done", [2] = "protocol error", [3] = "silence" }
local phases = { [1] = "request", [2] = "response" }

local UNIT, SEND_LEN, ACK_LEN = 4096, 28, 32
local UD_SEND = 0x64

local f = {
    version = ProtoField.uint8("bifrost_rdm.version", "Version", base.DEC, nil, 0xf0),
    send = ProtoField.uint8("bifrost_rdm.send", "SEND kind", base.DEC, send_kinds, 0x0f),
    control = ProtoField.uint8("bifrost_rdm.control", "Control kind", base.DEC, control_kinds, 0x0f),
    -- SEND (§3.1)
    hint = ProtoField.bool("bifrost_rdm.hint", "Acknowledge at once", 8, nil, 0x80),
    class = ProtoField.uint8("bifrost_rdm.class", "Class", base.DEC, classes, 0x0f),
    message = ProtoField.uint32("bifrost_rdm.message", "Message", base.DEC),
    global = ProtoField.uint64("bifrost_rdm.global", "Global number", base.DEC),
    length = ProtoField.uint32("bifrost_rdm.length", "Length of the message (bytes)", base.DEC),
    offset = ProtoField.uint32("bifrost_rdm.offset", "Offset (bytes)", base.DEC),
    call = ProtoField.uint32("bifrost_rdm.call", "Call", base.DEC),
    -- Control (§3.3 to §3.7)
    tag = ProtoField.uint32("bifrost_rdm.tag", "Tag", base.HEX),
    fresh = ProtoField.uint8("bifrost_rdm.fresh", "Fresh numbers", base.DEC),
    sequence = ProtoField.uint16("bifrost_rdm.sequence", "ACK sequence", base.DEC),
    bitmap = ProtoField.uint32("bifrost_rdm.bitmap", "Bitmap", base.HEX),
    least = ProtoField.uint64("bifrost_rdm.least", "Least global number", base.DEC),
    held = ProtoField.uint32("bifrost_rdm.held_ns", "Held (ns)", base.DEC),
    base = ProtoField.uint32("bifrost_rdm.base", "Base", base.DEC),
    limit = ProtoField.uint32("bifrost_rdm.limit", "Limit", base.DEC),
    acked_send = ProtoField.uint64("bifrost_rdm.acked_send", "SEND", base.DEC),
    acked_write = ProtoField.uint32("bifrost_rdm.acked_write", "WRITE", base.HEX),
    address = ProtoField.uint64("bifrost_rdm.address", "Address", base.HEX),
    key = ProtoField.uint32("bifrost_rdm.key", "Key", base.HEX),
    reason = ProtoField.uint8("bifrost_rdm.reason", "Reason", base.DEC, reasons),
    lane = ProtoField.uint8("bifrost_rdm.lane", "Lane", base.DEC, nil, 0xf0),
    phase = ProtoField.uint8("bifrost_rdm.phase", "Phase", base.DEC, phases, 0x0f),
    generation = ProtoField.uint16("bifrost_rdm.generation", "Generation", base.DEC),
    psn = ProtoField.uint32("bifrost_rdm.psn", "Next packet", base.DEC, nil, 0xffffff),
}
rdm.fields = f

local opcode = Field.new("infiniband.bth.opcode")

-- Whether bytes can be a SEND of a message: enough of §3.1 that other payloads are left to others.
local function is_send(tvb)
    if tvb:len() < SEND_LEN or not send_kinds[tvb(0, 1):uint() - 0x10] then return false end
    local flags, length, offset = tvb(1, 1):uint(), tvb(16, 4):uint(), tvb(20, 4):uint()
    return bit.band(flags, 0x7f) < 6 and tvb(2, 2):uint() == 0 and offset % UNIT == 0 and (offset < length or offset == 0)
end

local function is_control(tvb)
    local kind = tvb:len() >= 8 and tvb(0, 1):uint() - 0x10
    local len = tvb:len()
    return kind == 1 and len >= ACK_LEN and len % 4 == 0 or kind == 2 and len == 28
        or (kind == 3 or kind == 4) and len == 8 or kind == 5 and len == 12
end

local function send(tvb, pinfo, tree)
    local kind = tvb(0, 1):uint() - 0x10
    tree:add(f.send, tvb(0, 1))
    tree:add(f.hint, tvb(1, 1))
    tree:add(f.class, tvb(1, 1))
    tree:add(f.message, tvb(4, 4))
    tree:add(f.global, tvb(8, 8))
    tree:add(f.length, tvb(16, 4))
    tree:add(f.offset, tvb(20, 4))
    tree:add(f.call, tvb(24, 4))
    pinfo.cols.info:set(string.format("%s message %u, %u of %u", send_kinds[kind], tvb(4, 4):uint(), tvb(20, 4):uint(),
        tvb(16, 4):uint()))
end

local function numbers(tvb, tree)
    local bitmap, least = tvb(8, 4):uint(), tvb(12, 8):uint64()
    for at = 0, (tvb:len() - ACK_LEN) / 4 - 1 do
        local range = tvb(ACK_LEN + 4 * at, 4)
        if bit.band(bit.rshift(bitmap, 31 - at), 1) == 1 then
            tree:add(f.acked_send, range, least + range:uint())
        else
            tree:add(f.acked_write, range)
        end
    end
end

local function control(tvb, pinfo, tree)
    local kind = tvb(0, 1):uint() - 0x10
    tree:add(f.control, tvb(0, 1))
    tree:add(f.tag, tvb(4, 4))
    if kind == 1 then
        tree:add(f.fresh, tvb(1, 1))
        tree:add(f.sequence, tvb(2, 2))
        tree:add(f.bitmap, tvb(8, 4))
        tree:add(f.least, tvb(12, 8))
        tree:add(f.held, tvb(20, 4))
        tree:add(f.base, tvb(24, 4))
        tree:add(f.limit, tvb(28, 4))
        numbers(tvb, tree)
    elseif kind == 2 then
        tree:add(f.message, tvb(8, 4))
        tree:add(f.address, tvb(12, 8))
        tree:add(f.key, tvb(20, 4))
        tree:add(f.length, tvb(24, 4))
    elseif kind == 4 then
        tree:add(f.reason, tvb(1, 1))
    elseif kind == 5 then
        tree:add(f.lane, tvb(1, 1))
        tree:add(f.phase, tvb(1, 1))
        tree:add(f.generation, tvb(2, 2))
        tree:add(f.psn, tvb(8, 4))
    end
    pinfo.cols.info:set(string.format("%s for %08x", control_kinds[kind], tvb(4, 4):uint()))
end

function rdm.dissector(tvb, pinfo, root)
    local field = opcode()
    local datagram = field and field.value == UD_SEND
    -- Wireshark may hand the ICRC over as part of the payload.
    local fits = datagram and is_control or not datagram and is_send
    if not fits or not fits(tvb) then return false end
    pinfo.cols.protocol:set("RDM")
    local tree = root:add(rdm, tvb(0, datagram and tvb:len() or SEND_LEN))
    tree:add(f.version, tvb(0, 1))
    local body = datagram and control or send
    body(tvb, pinfo, tree)
    return true
end

rdm:register_heuristic("infiniband.payload", rdm.dissector)
