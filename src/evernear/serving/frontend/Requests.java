package evernear;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.socket.ChannelInputShutdownEvent;
import io.netty.handler.codec.TooLongFrameException;
import io.netty.handler.codec.http.DefaultHttpHeaders;
import io.netty.handler.codec.http.DefaultHttpRequest;
import io.netty.handler.codec.http.HttpHeaders;
import io.netty.handler.codec.http.HttpMessage;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpRequestDecoder;
import io.netty.handler.codec.http.HttpVersion;
import java.util.BitSet;
import java.util.List;

/**
 * Decodes one request at a time: after {@link #hold} the next one waits, as bytes, for {@link #next}.
 *
 * <p>Netty's FlowControlHandler holds decoded messages instead, any number of them: a client that sends ahead would
 * fill the heap.
 */
final class Requests extends HttpRequestDecoder {
    // One receive buffer and a bit; more arrives only from a client that has also shut its side (EPOLLRDHUP).
    private static final int MAX_AHEAD_BYTES = 128 * 1024;

    // RFC 9110, section 5.6.2; each header of each request is looked at, so it is no regular expression.
    private static final BitSet TOKEN_CHARACTERS = new BitSet();

    static {
        "!#$%&'*+-.^_`|~0123456789".chars().forEach(TOKEN_CHARACTERS::set);
        TOKEN_CHARACTERS.set('A', 'Z' + 1);
        TOKEN_CHARACTERS.set('a', 'z' + 1);
    }

    private enum Mode {
        DECODE,
        HOLD,
        DISCARD
    }

    private Mode mode = Mode.DECODE;
    private boolean reading;
    private boolean inputEnded;
    private ChannelHandlerContext context;

    @Override
    public void handlerAdded(ChannelHandlerContext context) {
        this.context = context;
    }

    /** Decode nothing more for now. */
    void hold() {
        mode = Mode.HOLD;
    }

    /** Decode the next request. */
    void next() throws Exception {
        resume(Mode.DECODE);
    }

    /** Read to the end of the connection, and decode nothing more. */
    void discard() throws Exception {
        resume(Mode.DISCARD);
    }

    private void resume(Mode next) throws Exception {
        mode = next;
        if (reading) {
            return; // channelRead goes on by itself
        }
        if (actualReadableBytes() > 0) {
            channelRead(context, Unpooled.EMPTY_BUFFER); // decodes what is here already
        }
        if (mode == Mode.HOLD) {
            return;
        }
        context.channel().config().setAutoRead(true);
        if (inputEnded) {
            inputEnded = false;
            super.userEventTriggered(context, ChannelInputShutdownEvent.INSTANCE);
        }
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object bytes) throws Exception {
        reading = true;
        try {
            super.channelRead(context, bytes);
        } finally {
            reading = false;
        }
        if (mode == Mode.HOLD && actualReadableBytes() > 0) {
            context.channel().config().setAutoRead(false);
            if (actualReadableBytes() > MAX_AHEAD_BYTES) {
                context.close();
            }
        }
    }

    @Override
    protected void decode(ChannelHandlerContext context, ByteBuf bytes, List<Object> messages) throws Exception {
        if (mode == Mode.DECODE) {
            super.decode(context, bytes, messages);
        } else if (mode == Mode.DISCARD) {
            bytes.skipBytes(bytes.readableBytes());
        }
    }

    /** Netty's own asks for more bytes when those that came gave no message, which here is on purpose. */
    @Override
    public void channelReadComplete(ChannelHandlerContext context) throws Exception {
        if (mode == Mode.HOLD) {
            context.fireChannelReadComplete();
        } else {
            super.channelReadComplete(context);
        }
    }

    /** The end of the client's side comes after all that it sent before. */
    @Override
    public void userEventTriggered(ChannelHandlerContext context, Object event) throws Exception {
        if (event == ChannelInputShutdownEvent.INSTANCE && mode == Mode.HOLD) {
            inputEnded = true;
        } else {
            super.userEventTriggered(context, event);
        }
    }

    @Override
    protected HttpMessage createMessage(String[] words) {
        requireToken(words[0], "method");
        return new DefaultHttpRequest(
                HttpVersion.valueOf(words[2]), HttpMethod.valueOf(words[0]), words[1], new Headers());
    }

    /** Netty's own prefers one of the two lengths, and whoever stands before us may prefer the other. */
    @Override
    protected void handleTransferEncodingChunkedWithContentLength(HttpMessage request) {
        throw new IllegalArgumentException("it has both Content-Length and Transfer-Encoding");
    }

    /** Netty's own takes control characters in some places. */
    private static void requireToken(CharSequence word, String what) {
        boolean isToken = word.length() > 0;
        for (int at = 0; at < word.length(); at++) {
            isToken &= TOKEN_CHARACTERS.get(word.charAt(at));
        }
        if (!isToken) {
            throw new IllegalArgumentException("the " + what + " is no token");
        }
    }

    /** Netty's own bounds their characters alone, not their number. */
    private static final class Headers extends DefaultHttpHeaders {
        private static final int MAX_HEADERS = 100;

        private int count;

        @Override
        public HttpHeaders add(CharSequence name, Object value) {
            if (++count > MAX_HEADERS) {
                throw new TooLongFrameException("more than " + MAX_HEADERS + " headers");
            }
            requireToken(name, "name of a header");
            return super.add(name, value);
        }
    }
}
